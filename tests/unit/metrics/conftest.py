"""Small groups and records for the tests of the metrics room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lachesis.common.types import Group, Prompt, Sample, VersionSpan


def build_group(
    rewards: Sequence[float | None] = (0.0, 1.0),
    *,
    prompt: str = "37+45=",
    completions: Sequence[tuple[int, ...]] | None = None,
    texts: Sequence[str] | None = None,
    finish_reason: Any = "stop",
    **columns: Any,
) -> Group:
    """A group with a sample a reward; completions differ unless given."""
    prompt_ids = tuple(ord(character) for character in prompt)
    completions = completions or [(2, 8, index) for index in range(len(rewards))]
    samples = tuple(
        Sample(
            prompt_ids=prompt_ids,
            completion_ids=ids,
            logprobs=(-0.5,) * len(ids),
            finish_reason=finish_reason,
            versions=VersionSpan(3, 4),
            text=texts[index] if texts is not None else "28" + str(index),
            rewards=(reward,),
            reward=reward,
            advantage=0.25,
        )
        for index, (reward, ids) in enumerate(zip(rewards, completions, strict=True))
    )
    return Group(prompt=Prompt(id=prompt, token_ids=prompt_ids, text=prompt, columns=columns), samples=samples)


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return build_group
