"""Filters that decide which groups carry a learning signal."""

from __future__ import annotations

from lachesis.common.types import Group


def has_signal(group: Group) -> bool:
    """Return True if the group carries a learning signal.

    Its rewards differ, or an environment has given it advantages that are not all 0. Where all rewards are equal (or
    unknown) every advantage is 0.
    """
    known = [reward for reward in group.rewards if reward is not None]
    return len(set(known)) > 1 or any(given_advantages(group))


def any_reward_differs(group: Group) -> bool:
    """Return True if any single reward function's values differ within the group.

    This is :func:`has_signal` for rewards that are normalized function by function, where equal totals may still
    carry a signal.
    """
    columns = zip(*(sample.rewards for sample in group.samples), strict=True)
    return has_signal(group) or any(len({value for value in column if value is not None}) > 1 for column in columns)


def given_advantages(group: Group) -> list[float]:
    """Return the advantages that came with the group's samples, of samples and of tokens, without computed ones."""
    of_samples = [sample.advantage for sample in group.samples if sample.advantage is not None]
    return of_samples + [value for sample in group.samples for value in sample.token_advantages or ()]


def failed_entirely(group: Group) -> bool:
    """Return True if every completion got a reward of 0 (within 1e-6), so that the prompt is worth a later retry."""
    known = [reward for reward in group.rewards if reward is not None]
    return bool(known) and all(abs(reward) < 1e-6 for reward in known)
