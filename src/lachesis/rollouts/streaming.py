"""Rewards while other groups are still being generated."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, Prompt
from lachesis.rollouts.generation import generation_requests, read_groups
from lachesis.rollouts.local import LocalSource, Rollouts, tokens_in
from lachesis.rollouts.overlap import Overlap
from lachesis.rollouts.rewards.rewarder import Scored

# A request that is complete: its place in the call, and its completions.
Answer = tuple[int, list[Completion]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Groups that were scored together; ``places`` are those of their prompts."""

    places: list[int]
    tokens: int
    scored: Scored


class StreamingSource(LocalSource):
    """Scores groups as they are finished, while the engine generates others.

    The engine gets the same call as without streaming, and the groups are the same, in the same order. Where
    rewards fail the rest of the generation is called off.

    Args:
        min_groups: fewest groups that are scored together; the last may be fewer.

    The other arguments are those of :class:`LocalSource`.
    """

    def __init__(self, *, min_groups: int, **rest: Any) -> None:
        super().__init__(**rest)
        self._min_groups = min_groups
        self._hidden_s = 0.0

    def counters(self) -> dict[str, float]:
        """Those of :class:`LocalSource`, and ``hidden_reward_time``: the seconds of ``reward_time`` in which other
        groups were still being generated."""
        hidden, self._hidden_s = self._hidden_s, 0.0
        return super().counters() | {"hidden_reward_time": hidden}

    def _roll_out(
        self, prompts: list[Prompt], seeds: list[int], *, generation: Deadline, deadline: Deadline
    ) -> Rollouts:
        def score(answers: Sequence[Answer]) -> _Part:
            return self._score(prompts, answers)

        requests = generation_requests(prompts, params=self._params, num_generations=self._num_generations, seeds=seeds)
        with Overlap(score, at_least=self._min_groups, name="lachesis-scoring") as scoring:
            started = time.monotonic()
            with generation.waiting():
                self._engine.generate(
                    requests, deadline=generation, finished=lambda place, answer: scoring.put((place, answer))
                )
            generated = time.monotonic()
            parts = scoring.results(deadline=deadline)
        _check_places(parts, count=len(prompts))
        self._hidden_s += scoring.seconds(until=generated)
        return Rollouts(
            scored=_merge(parts),
            tokens=sum(part.tokens for part in parts),
            generation_s=generated - started,
            reward_s=scoring.seconds(),
        )

    def _score(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> _Part:
        places = [place for place, _ in answers]
        groups = read_groups(
            [prompts[place] for place in places],
            [completions for _, completions in answers],
            params=self._params,
            num_generations=self._num_generations,
            decode=self._decode,
        )
        return _Part(places, tokens_in(groups), self._rewarder.score(groups))


def _check_places(parts: Sequence[_Part], *, count: int) -> None:
    if sorted(place for part in parts for place in part.places) != list(range(count)):
        answered = sum(len(part.places) for part in parts)
        raise EngineError(
            f"the engine handed back {answered} groups as they were finished, of {count} requests",
            remedy="look into the engine's log; the requests were sound",
        )


def _merge(parts: Sequence[_Part]) -> Scored:
    """All parts as one call would have scored them: in the order of the prompts, whatever was finished first."""
    placed = [
        (part.places[index], group, extras)
        for part in parts
        for index, group, extras in zip(part.scored.kept, part.scored.groups, part.scored.extras, strict=True)
    ]
    placed.sort(key=lambda entry: entry[0])
    return Scored(
        groups=[group for _, group, _ in placed],
        dropped=sum(part.scored.dropped for part in parts),
        errors=[error for part in parts for error in part.scored.errors],
        kept=[place for place, _, _ in placed],
        extras=[extras for _, _, extras in placed],
        metrics=_mean_metrics(parts),
    )


def _mean_metrics(parts: Sequence[_Part]) -> Mapping[str, float]:
    """Of each metric that reward functions logged, its mean over groups."""
    weighted: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, value in part.scored.metrics.items():
            total, groups = weighted.get(name, (0.0, 0))
            weighted[name] = (total + value * len(part.places), groups + len(part.places))
    return {name: total / groups for name, (total, groups) in weighted.items()}
