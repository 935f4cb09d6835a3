"""Replay buffer, whose groups with a learning signal replace groups without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lachesis.common.errors import CheckpointError
from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.types import Group
from lachesis.pipeline.filters import given_advantages, has_signal


class ReplayBuffer:
    """Buffer of the up to ``size`` groups with the highest scores.

    A group's score is sum |R - mean R| over its completions, which is sum |A| · std (the score of TRL's and
    Axolotl's replay buffers) with advantages normalized by the group. A group is drawn in proportion to its
    score and stays in the buffer; one that enters a full buffer drives out the lowest.

    Args:
        size: most groups kept.
        seed: of the draws.
        signal: which groups have signal.
    """

    def __init__(self, *, size: int, seed: int, signal: Callable[[Group], bool] = has_signal) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._size = size
        self._signal = signal
        self._kept: list[Group] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._kept)

    def mix(self, groups: Sequence[Group]) -> list[Group]:
        """Return ``groups`` with those that have no signal replaced, as far as the buffer has others.

        Draws come before the new groups enter, so no group replaces its own neighbour, and are without replacement
        within the batch. A group from the buffer says which one it ``replaces``.
        """
        drawn = iter(self._draw(sum(not self._signal(group) for group in groups)))
        mixed = [group if self._signal(group) else _instead(group, next(drawn, None)) for group in groups]
        for group in groups:
            if self._signal(group):
                self._keep(group)
        return mixed

    def _draw(self, count: int) -> list[Group]:
        left = list(self._kept)
        drawn: list[Group] = []
        while left and len(drawn) < count:
            index = self._random.choices(range(len(left)), weights=[score(group) for group in left])[0]
            drawn.append(left.pop(index))
        return drawn

    def _keep(self, group: Group) -> None:
        self._kept.append(group)
        if len(self._kept) > self._size:
            self._kept.remove(min(self._kept, key=score))

    def state_dict(self) -> dict[str, Any]:
        """Return the groups and the state of the generator; JSON-serializable."""
        version, internal, gauss = self._random.getstate()
        return {"groups": [encode_group(group) for group in self._kept], "random": [version, list(internal), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a smaller buffer keeps the groups with the highest scores.

        Raises:
            CheckpointError: it is not a state of a replay buffer.
        """
        try:
            kept = [decode_group(line) for line in state["groups"]]
            version, internal, gauss = state["random"]
            self._random.setstate((version, tuple(internal), gauss))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's replay buffer cannot be read: {type(error).__name__} {error}",
                remedy="resume from an earlier checkpoint",
            ) from error
        self._kept = kept
        while len(self._kept) > self._size:
            self._kept.remove(min(self._kept, key=score))


def score(group: Group) -> float:
    """Return sum |R - mean R| over the completions that have a reward.

    Where the totals are equal but there is a signal, return the largest such sum of a single reward function, or
    sum |A| of the advantages that an environment gave.
    """
    columns = zip(*(sample.rewards for sample in group.samples), strict=True)
    given = sum(abs(value) for value in given_advantages(group))
    return _spread(group.rewards) or max(map(_spread, columns), default=0.0) or given


def _spread(rewards: Iterable[float | None]) -> float:
    known = [reward for reward in rewards if reward is not None]
    mean = sum(known) / max(len(known), 1)
    return sum(abs(reward - mean) for reward in known)


def _instead(group: Group, kept: Group | None) -> Group:
    return group if kept is None else replace(kept, replaces=group)
