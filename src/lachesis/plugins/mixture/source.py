"""Mixture of several sources in one run: each has its share of the groups, and none waits for another."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import CheckpointError, DataError, DeadlineExceeded, RewardError
from lachesis.common.types import Group, Prompt
from lachesis.metrics.meters import BusyTime
from lachesis.metrics.names import BY_SOURCE
from lachesis.process.threads import DaemonThread
from lachesis.rollouts.base import Done, Draw, GroupwiseSource
from lachesis.rollouts.prompt_source import DrawingSource, PromptSource

_REWARD_METRICS = "reward_metrics/"
# Counters that are reported for each source, besides the sum.
_TOLD = ("dropped_groups", "reward_errors", "rollout_failures", "curriculum_skipped", "curriculum_tokens_saved")


class Shares:
    """Turns of several names in proportion to their weights: the one with the most credit has the next.

    Each turn credits every name with its share of one, and charges one to the name that has it. So after any number
    of turns each has had its share to within one turn, and after a whole period exactly its share.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = {name: Fraction(str(weight)) for name, weight in weights.items()}
        self._owed = dict.fromkeys(self._weights, Fraction(0))

    def next(self, among: Collection[str]) -> str:
        """Return the name ``among`` these that has the turn. The others get no credit for it."""
        total = sum(self._weights[name] for name in among)
        for name in among:
            self._owed[name] += self._weights[name] / total
        chosen = max((name for name in self._weights if name in among), key=self._owed.__getitem__)
        self._owed[chosen] -= 1
        return chosen

    def state_dict(self) -> dict[str, str]:
        """Return the credit of each name, as exact fractions."""
        return {name: str(owed) for name, owed in self._owed.items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._owed = {name: Fraction(state[name]) for name in self._weights}


@dataclass(frozen=True, slots=True)
class Ingredient:
    """Source of a mixture.

    Args:
        source: the source.
        weight: its share of the groups, relative to the weights of the others.
        max_unfinished: while this many of its groups are unfinished, it has no turn, and the others get its share;
            ``None`` always keeps the shares.
    """

    source: GroupwiseSource
    weight: float = 1.0
    max_unfinished: int | None = None


class SourceMixture(DrawingSource):
    """Source that draws from several others by their weights, and lets each finish its groups at its own pace.

    Groups bear the name of their source in their prompt. The requests of all sources are numbered together, so a
    mixture of one source samples the same as that source alone.

    Args:
        ingredients: the sources by name, in the order that breaks ties.
    """

    def __init__(self, ingredients: Mapping[str, Ingredient]) -> None:
        self.ingredients = dict(ingredients)
        self._shares = Shares({name: one.weight for name, one in self.ingredients.items()})
        self._front: deque[str] = deque()  # sources of prompts that were put back, which go first
        self._step = 0
        self._lock = threading.Lock()
        self._unfinished: dict[int, str] = {}  # the source of each request that is drawn but not finished
        self.queues = any(source.queues for source in self._sources())
        generating = BusyTime()
        for one in self._sources():
            if isinstance(one, PromptSource):
                one.measure(generating)  # sources generate at the same time, so that time counts once

    def _sources(self) -> list[GroupwiseSource]:
        return [one.source for one in self.ingredients.values()]

    def draw(self, count: int) -> list[Draw]:
        with self._lock:
            return [self._draw() for _ in range(count)]

    def _draw(self) -> Draw:
        name = self._front.popleft() if self._front else self._shares.next(self._open())
        prompt = self.ingredients[name].source.draw(1)[0].prompt
        draw = Draw(replace(prompt, source=name), self._requests)
        self._requests += 1
        self._unfinished[draw.request] = name
        return draw

    def _open(self) -> Collection[str]:
        """Return the sources that may have a turn: all of them if each has reached its limit of unfinished groups."""
        unfinished = Counter(self._unfinished.values())
        found = [
            name
            for name, one in self.ingredients.items()
            if one.max_unfinished is None or unfinished[name] < one.max_unfinished
        ]
        return found or list(self.ingredients)

    def _end(self, draw: Draw) -> None:
        """Note that the group of a draw is finished or dropped."""
        with self._lock:
            self._unfinished.pop(draw.request, None)

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        """Have each source roll out its draws on a separate thread. The others may finish after an error of one."""
        places: dict[str, list[int]] = {}
        for place, draw in enumerate(draws):
            places.setdefault(draw.prompt.source, []).append(place)
        with self._lock:
            self._unfinished |= {draw.request: draw.prompt.source for draw in draws}
        with ExitStack() as closing:
            calls = []
            for name, mine in places.items():
                thread = DaemonThread(f"lachesis-source-{name}")
                closing.callback(thread.abandon)
                share = {"draws": [draws[place] for place in mine], "deadline": deadline}
                tell = partial(self._tell, draws, mine, done)
                calls.append(thread.submit(partial(self._roll_out, name), {**share, "done": tell}))
            wait(calls)
            for call in calls:
                call.result()

    def _roll_out(self, name: str, *, draws: Sequence[Draw], deadline: Deadline, done: Done) -> None:
        """Have one source roll out its draws. An error of the source names it."""
        try:
            self.ingredients[name].source.roll_out(draws, deadline=deadline, done=done)
        except (RewardError, DataError, DeadlineExceeded) as error:
            error.message = f"source {name}: {error.message}"
            raise

    def _tell(
        self, draws: Sequence[Draw], places: Sequence[int], done: Done, index: int, outcome: Group | RewardError
    ) -> None:
        """Call ``done`` for one draw of a source, with its place among the draws of all."""
        draw = draws[places[index]]
        self._end(draw)
        if isinstance(outcome, Group):
            outcome = replace(outcome, prompt=replace(outcome.prompt, source=draw.prompt.source))
        else:
            outcome = RewardError(f"source {draw.prompt.source}: {outcome.message}", remedy=outcome.remedy)
        done(places[index], outcome)

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        """Make these prompts the next ones, whatever the shares; return False if a source cannot take its own back."""
        for name, one in self.ingredients.items():
            mine = [prompt for prompt in prompts if prompt.source == name]
            if mine and not one.source.requeue(mine):
                return False
        with self._lock:
            self._front.extendleft(reversed([prompt.source for prompt in prompts]))
        return True

    def report_version(self, version: int) -> None:
        self._step = version
        for source in self._sources():
            source.report_version(version)

    def counters(self) -> dict[str, float]:
        """Return the sums of the sources' counters; failures also by source, as ``source/NAME/COUNT``.

        Metrics that reward functions logged stay separate, as ``reward_metrics/SOURCE/NAME``.
        """
        sums: Counter[str] = Counter()
        apart: dict[str, float] = {}
        for name, one in self.ingredients.items():
            for key, value in one.source.counters().items():
                if key.startswith(_REWARD_METRICS):
                    apart[f"{_REWARD_METRICS}{name}/{key.removeprefix(_REWARD_METRICS)}"] = value
                else:
                    sums[key] += value  # type: ignore[assignment]
                if key in _TOLD:
                    apart[f"{BY_SOURCE}{name}/{key}"] = value
        return dict(sums) | apart

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the credit of every source, and the number of requests so far."""
        return {
            "sources": {name: one.source.state_dict() for name, one in self.ingredients.items()},
            "shares": self._shares.state_dict(),
            "front": list(self._front),
            "requests": self._requests,
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointError: it is of other sources, or a source has another dataset.
        """
        saved, here = list(state.get("sources", ())), list(self.ingredients)
        if sorted(saved) != sorted(here):
            raise CheckpointError(
                f"the checkpoint is of the sources {', '.join(saved) or '(one without a name)'}, but the "
                f"configuration has {', '.join(here)}",
                remedy="resume with the same names under sources, or start a new run",
            )
        for name, one in self.ingredients.items():
            try:
                one.source.load_state_dict(state["sources"][name])
            except CheckpointError as error:
                raise CheckpointError(f"source {name}: {error.message}", remedy=error.remedy) from error
        self._shares.load_state_dict(state["shares"])
        self._front = deque(state["front"])
        self._requests = int(state["requests"])
        self._step = int(state["step"])
        self._unfinished.clear()

    def saved(self) -> None:
        for source in self._sources():
            source.saved()

    def complete(self) -> None:
        for source in self._sources():
            source.complete()

    def close(self) -> None:
        """Close every source. Idempotent."""
        with ExitStack() as closing:
            for source in self._sources():
                closing.callback(source.close)
