"""Advantages of single tokens, added to those of their sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lachesis.common.errors import TrainingError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.batch import pack


def sample(completion: tuple[int, ...], advantage: float, **changes: Any) -> Sample:
    return Sample(
        prompt_ids=(1, 2),
        completion_ids=completion,
        logprobs=(-1.0,) * len(completion),
        finish_reason="stop",
        versions=VersionSpan(0, 0),
        advantage=advantage,
        **changes,
    )


def group(*samples: Sample) -> Group:
    return Group(Prompt(id="p", token_ids=(1, 2), text=""), samples)


def advantages(*samples: Sample, **options: Any) -> torch.Tensor:
    (micro,) = pack([group(*samples)], max_tokens=100, **options).micro_batches
    return micro.advantages


def test_each_loss_token_has_its_own_where_any_sample_has():
    masked = sample((3, 4, 5), 1.0, mask=(1, 0, 1), token_advantages=(0.5, 9.0, -1.0))
    assert sorted(advantages(masked, sample((6,), -2.0)).tolist()) == [-2.0, 0.0, 1.5]


def test_without_any_there_is_one_a_row():
    assert sorted(advantages(sample((3, 4, 5), 1.0), sample((6,), -2.0)).tolist()) == [-2.0, 1.0]


def test_a_row_of_which_only_tokens_teach_is_not_left_out():
    teaching = sample((3, 4), 0.0, token_advantages=(0.0, 0.5))
    batch = pack([group(teaching, sample((5,), 0.0))], max_tokens=100, skip_zero_advantage=True)
    assert batch.skipped_sequences == 1
    assert batch.micro_batches[0].advantages.tolist() == [0.0, 0.5]


def test_another_length_is_refused():
    with pytest.raises(TrainingError):
        pack([group(sample((3, 4), 0.0, token_advantages=(1.0,)))], max_tokens=100)
