"""Advantages of a batch's groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lachesis.common.errors import RewardError
from lachesis.common.types import Group

# From rewards [N][K] (None: the function abstained) and group numbers [N] to advantages [N].
AdvantageFunction = Callable[[Sequence[Sequence[float | None]], Sequence[int]], list[float]]


def assign_advantages(groups: Sequence[Group], *, compute: AdvantageFunction) -> list[Group]:
    """Set every sample's advantage from the rewards of all groups, which some normalizations need at once.

    Raises:
        RewardError: no sample has any reward.
    """
    rewards = [sample.rewards for group in groups for sample in group.samples]
    if rewards and all(value is None for row in rewards for value in row):
        raise RewardError(
            f"every reward function abstained on all {len(rewards)} completions of this step",
            remedy="let at least one function judge, or train on more prompts a step (batch.prompts_per_step)",
        )
    number = [i for i, group in enumerate(groups) for _ in group.samples]
    advantages = iter([value for _, value in zip(number, compute(rewards, number), strict=True)])
    return [
        replace(group, samples=tuple(replace(sample, advantage=next(advantages)) for sample in group.samples))
        for group in groups
    ]
