"""Scoring of rewards while other groups are still being generated: work on finished groups while more are coming."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, Prompt
from lachesis.process.threads import DaemonThread
from lachesis.rollouts.base import Done, Draw
from lachesis.rollouts.generation import generation_requests, read_groups
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.prompt_source import tell_all
from lachesis.rollouts.rewards.attempts import Item

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Overlap(Generic[ItemT, ResultT]):
    """Worker on items in a separate thread while more items are being put in.

    A call of ``work`` gets all items put in before it, in order, and waits for ``at_least`` of them; the last call gets
    the rest. Its error is raised to the next caller that puts in an item or waits for the results.

    As a context manager it ends the thread. If putting in failed, a call that is still running then is abandoned with
    its result.

    Args:
        at_least: minimum number of items of a call, except the last.
    """

    def __init__(self, work: Callable[[Sequence[ItemT]], ResultT], *, at_least: int, name: str) -> None:
        self._work = work
        self._at_least = at_least
        self._thread = DaemonThread(name)
        self._waiting: deque[ItemT] = deque()
        self._given = self._done = 0
        self._results: list[ResultT] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Overlap[ItemT, ResultT]:
        return self

    def __exit__(self, *exception: object) -> None:
        self._abandoned = True
        self._thread.abandon()

    def put(self, item: ItemT) -> None:
        """Put in another item and return at once. Raises any error that ``work`` raised."""
        if self._error is not None:
            raise self._error
        self._waiting.append(item)
        self._given += 1
        self._thread.submit(self._turn, {"at_least": self._at_least})

    def results(self, *, deadline: Deadline) -> list[ResultT]:
        """Return all results, once all items are done; nothing more may be put in.

        Raises:
            DeadlineExceeded: that took too long.
            Exceptions of ``work``.
        """
        last = self._thread.submit(self._turn, {"at_least": 1})
        while not wait([last], timeout=deadline.remaining_s()).done:
            deadline.check(f"{self._done} of {self._given} are done")
        if self._error is not None:
            raise self._error
        return self._results

    def seconds(self, *, until: float = math.inf) -> float:
        """Return the seconds spent on work, up to a moment of ``time.monotonic()``."""
        return sum(max(0.0, min(end, until) - start) for start, end in self._spans)

    def _turn(self, at_least: int) -> None:
        """Call ``work`` on the waiting items, if there are enough; called after each item and at the end."""
        if self._abandoned or self._error is not None or len(self._waiting) < at_least:
            return
        items = [self._waiting.popleft() for _ in range(len(self._waiting))]
        started = time.monotonic()
        try:
            self._results.append(self._work(items))
        except BaseException as error:  # raised again where it is waited for
            self._error = error
            return
        self._spans.append((started, time.monotonic()))
        self._done += len(items)


# A complete request: its place in the call, and its completions.
Answer = tuple[int, list[Completion]]


@dataclass(kw_only=True, eq=False)
class StreamingSource(LocalSource):
    """Source that scores groups as they are finished, while the engine generates others.

    The engine gets the same call as without streaming, and the groups are the same, in the same order. Where
    rewards fail the rest of the generation is called off.

    Args:
        min_groups: fewest groups that are scored together; the last may be fewer.
    """

    min_groups: int

    # Seconds of ``reward_time`` during which other groups of the call were generated.
    _counted: ClassVar[tuple[str, ...]] = ("hidden_reward_time",)

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        """Score groups in a separate thread, and pass them to ``done``, while others are generated."""
        prompts, seeds = self._prompts(draws), [self._request_seed(draw) for draw in draws]

        def score(answers: Sequence[Answer]) -> list[int]:
            places = [place for place, _ in answers]
            items = self._read(prompts, answers)
            outcomes = self._judge.score(items)
            self._note_pass_rates(items, outcomes)
            tell_all(done, dict(zip(places, outcomes, strict=True)))
            return places

        requests = generation_requests(prompts, params=self.params, num_generations=self.num_generations, seeds=seeds)
        generation = self._generation(draws, deadline)
        with Overlap(score, at_least=self.min_groups, name="lachesis-scoring") as scoring:
            with generation.waiting(), self._generating.span():
                self.engine.generate(
                    requests, deadline=generation, finished=lambda place, answer: scoring.put((place, answer))
                )
            generated = time.monotonic()
            answered = [place for places in scoring.results(deadline=deadline) for place in places]
        _check_places(answered, count=len(prompts))
        hidden = scoring.seconds(until=generated)
        self._counts.add(reward_time=scoring.seconds(), hidden_reward_time=hidden)

    def _read(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Item]:
        groups = read_groups(
            [prompts[place] for place, _ in answers],
            [completions for _, completions in answers],
            params=self.params,
            num_generations=self.num_generations,
            decode=self.decode,
        )
        return [Item(group) for group in groups]


def _check_places(answered: Sequence[int], *, count: int) -> None:
    if sorted(answered) != list(range(count)):
        raise EngineError(
            f"the engine returned {len(answered)} finished groups for {count} requests, or one group twice",
            remedy="read the engine's log; the requests were valid",
        )
