"""Reward functions for environments that are stepped: they get the environments, as TRL's do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lachesis.common.types import Group, Message, Prompt
from lachesis.rollouts.episodes import Played, RolloutFailed
from lachesis.rollouts.failures import excluded_in_words
from lachesis.rollouts.rewards.attempts import TURNS
from lachesis.rollouts.rewards.rewarder import Rewarder

COLUMN = "environments"
"""The argument by which a reward function gets the environments."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """Remains of an episode: its task, the environment, its first messages, and all messages after that."""

    prompt: Prompt
    subject: Any
    start: tuple[Message, ...]
    said: tuple[Message, ...]


async def scored(played: Sequence[Played], rewarder: Rewarder, *, owned: bool) -> list[Played | RolloutFailed]:
    """Return episodes of one task with their rewards: of the functions and, with ``owned``, last the environment's.

    An episode of several sequences is judged once, by its last. One that a function could not judge has failed.
    Functions run in a separate thread.

    Raises:
        RewardError: a function failed, unless ``rewards.on_error`` drops the group: then none is left.
    """
    ended: list[EpisodeEnd] = [one.state for one in played]
    asked = ended[0].prompt
    extras: dict[str, Any] = {COLUMN: [one.subject for one in ended]}
    if ended[0].start:  # an environment of tokens has no messages
        asked = replace(asked, messages=ended[0].start)
        extras[TURNS] = [list(one.said) for one in ended]
    group = Group(asked, tuple(one.samples[-1] for one in played))
    found = await asyncio.to_thread(rewarder.score, [group], extras=[extras])
    if not found.groups:
        return []
    (judged,), (excluded,) = found.groups, found.excluded
    why = excluded_in_words(judged, excluded)
    return [
        RolloutFailed(why[place], cause=excluded[place].counted)
        if place in excluded
        else _with(one, sample.rewards, sample.reward, owned=owned)
        for place, (one, sample) in enumerate(zip(played, judged.samples, strict=True))
    ]


def _with(played: Played, rewards: tuple[float | None, ...], total: float | None, *, owned: bool) -> Played:
    own = played.samples[-1].reward
    if owned and own is not None:
        rewards, total = (*rewards, own), own + (total or 0.0)
    samples = tuple(replace(sample, rewards=rewards, reward=total) for sample in played.samples)
    return replace(played, samples=samples)
