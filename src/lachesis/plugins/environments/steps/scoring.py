"""Scoring of stepped environments by reward functions, which get the environments as in TRL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat, zip_longest
from statistics import mean, stdev
from typing import Any

from lachesis.common.types import Group, Message, Prompt
from lachesis.rollouts.episodes import Played, RolloutFailed
from lachesis.rollouts.failures import excluded_in_words
from lachesis.rollouts.rewards.attempts import TURNS
from lachesis.rollouts.rewards.rewarder import Rewarder

_EPSILON = 1e-4  # the same as in a group's advantages
COLUMN = "environments"
"""Name of the argument with which a reward function gets the environments."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """Record of a finished episode: its task, the environment, its first messages, and all messages after that.

    ``turns`` has each turn's reward and number of tokens.
    """

    prompt: Prompt
    subject: Any
    start: tuple[Message, ...]
    said: tuple[Message, ...]
    turns: tuple[tuple[float, int], ...] = ()


def with_turn_advantages(played: Sequence[Played], *, weight: float, apart: bool = False) -> list[Played]:
    """Return a group's episodes with an advantage for each turn: weight·(r - mean) / (std + 1e-4).

    Mean and sample deviation are of the rewards of the turns of the same number in the group, so that a turn that only
    one episode has gets 0. The tokens of a turn have its advantage beside that of their episode, as in MT-GRPO (arXiv
    2505.11821), whose weight of turns is 1, for any number of turns.

    With ``apart`` also as in its authors' code (github.com/SiliangZeng/Multi-Turn-RL-Agent): a turn that an episode
    lacks has reward 0 there, and an episode with none of these turns, which called no tool, has the advantage of its
    whole reward among the whole rewards of the group, turns included.
    """
    turns: list[tuple[tuple[float, int], ...]] = [one.state.turns for one in played]
    missing = (0.0, 0) if apart else None
    moments = [_moments([turn[0] for turn in row if turn]) for row in zip_longest(*turns, fillvalue=missing)]
    outcomes = [one.samples[-1].reward or 0.0 for one in played]
    wholes = [outcome + sum(reward for reward, _ in own) for outcome, own in zip(outcomes, turns, strict=True)]
    found: list[Played] = []
    for one, own, outcome, whole in zip(played, turns, outcomes, wholes, strict=True):
        each = [(weight * _normalized(turn[0], at), turn[1]) for turn, at in zip(own, moments, strict=False)]
        if apart and not own:  # in place of the outcome's, which the advantage of the episode is
            instead = _normalized(whole, _moments(wholes)) - _normalized(outcome, _moments(outcomes))
            each = [(instead, sum(sum(sample.loss_mask()) for sample in one.samples))]
        found.append(_by_token(one, each))
    return found


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    return mean(rewards), stdev(rewards) if len(rewards) > 1 else 0.0


def _normalized(reward: float, moments: tuple[float, float]) -> float:
    return (reward - moments[0]) / (moments[1] + _EPSILON)


def _by_token(played: Played, advantages: Sequence[tuple[float, int]]) -> Played:
    """Return an episode whose sampled tokens have the advantages of their turns, each with its number of tokens."""
    each = chain.from_iterable(repeat(value, tokens) for value, tokens in advantages)
    samples = tuple(
        replace(sample, token_advantages=tuple(next(each, 0.0) if sampled else 0.0 for sampled in sample.loss_mask()))
        for sample in played.samples
    )
    return replace(played, samples=samples)


async def scored(played: Sequence[Played], rewarder: Rewarder, *, owned: bool) -> list[Played | RolloutFailed]:
    """Return episodes of one task with their rewards: those of the functions, then, with ``owned``, the environment's.

    An episode of several sequences is judged once, by its last. An episode that a function could not judge has failed.
    Functions run in a separate thread.

    Raises:
        RewardError: a function failed, unless ``rewards.on_error`` drops the group: then the result is empty.
    """
    ended: list[EpisodeEnd] = [one.state for one in played]
    asked = ended[0].prompt
    extras: dict[str, Any] = {COLUMN: [one.subject for one in ended]}
    if ended[0].start:  # an environment that works on tokens has no messages
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
