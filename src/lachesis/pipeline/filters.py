"""Which groups teach something."""

from __future__ import annotations

from lachesis.common.types import Group


def has_signal(group: Group) -> bool:
    """Whether something can be learned from the group.

    Its rewards differ, or an environment has given it advantages that are not all 0. Where all rewards are equal (or
    unknown) every advantage is 0.
    """
    known = [reward for reward in group.rewards if reward is not None]
    return len(set(known)) > 1 or any(given_advantages(group))


def any_reward_differs(group: Group) -> bool:
    """:func:`has_signal` where each function's rewards are normalized of their own: equal totals then may teach."""
    columns = zip(*(sample.rewards for sample in group.samples), strict=True)
    return has_signal(group) or any(len({value for value in column if value is not None}) > 1 for column in columns)


def given_advantages(group: Group) -> list[float]:
    """The advantages that came with the group's samples, of whole samples and of tokens; those to be computed not."""
    of_samples = [sample.advantage for sample in group.samples if sample.advantage is not None]
    return of_samples + [value for sample in group.samples for value in sample.token_advantages or ()]


def failed_entirely(group: Group) -> bool:
    """Whether every completion got a reward of 0 (to 1e-6): a prompt to try again when the policy is better."""
    known = [reward for reward in group.rewards if reward is not None]
    return bool(known) and all(abs(reward) < 1e-6 for reward in known)
