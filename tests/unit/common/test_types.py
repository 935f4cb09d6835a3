from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from lachesis.common.prompt_images import PromptImages
from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.teacher_logprobs import TeacherLogprobs
from lachesis.common.types import Sample, VersionSpan

TAUGHT = TeacherLogprobs(
    ids=np.zeros((2, 1), np.int32), logprobs=np.zeros((2, 1), np.float32), sampled=np.zeros(2, np.float32)
)


def test_a_sample_that_is_judged_keeps_all_that_it_had():
    """Each field has a value that is not its default, so that one which is forgotten is seen."""
    sample = Sample(
        prompt_ids=(1,),
        completion_ids=(2, 3),
        logprobs=(-1.0, -2.0),
        finish_reason="length",
        versions=VersionSpan(1, 2),
        text="ab",
        mask=(1, 0),
        temperature=0.5,
        rewards=(0.1,),
        reward=0.1,
        advantage=0.2,
        token_advantages=(0.3, 0.4),
        teacher=TAUGHT,
        teacher_prompt_ids=(4,),
        routed=RoutedExperts(np.zeros((2, 1, 2), np.uint8)),
        images=(PromptImages({}),),
    )
    defaults = {field.name: field.default for field in fields(Sample)}
    assert all(getattr(sample, name) != default for name, default in defaults.items())
    judged = {"rewards": (1.0, None), "reward": 1.0, "advantage": -1.0}
    assert sample.judged(**judged) == replace(sample, **judged)
