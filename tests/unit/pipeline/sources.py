"""Sources and groups for the tests of the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import RewardError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.rollouts.base import Done, Draw, GroupwiseSource
from tests.waiting import LONG_S

Rewards = Sequence[float | None]


def group(name: str, rewards: Rewards, *, version: int = 0) -> Group:
    samples = tuple(
        Sample(
            prompt_ids=(1, 2),
            completion_ids=(3,),
            logprobs=(-0.5,),
            finish_reason="stop",
            versions=VersionSpan(version, version),
            rewards=(reward,),
            reward=reward,
        )
        for reward in rewards
    )
    return Group(prompt=Prompt(id=name, token_ids=(1, 2), text=""), samples=samples)


class ScriptedSource(GroupwiseSource):
    """Prompts numbered from 0 (or put back), rewards from a function of the prompt's name and how often it came.

    ``version`` is what its samples say. Where ``gate`` is given, every call waits for it. Groups that are drawn are
    finished at once, in order, but for those that are :meth:`hold`; ``failing`` ones have no reward.
    """

    def __init__(
        self,
        rewards: Callable[[str, int], Rewards] = lambda name, attempt: (0.0, 1.0),
        *,
        can_requeue: bool = True,
        gate: threading.Semaphore | None = None,
    ) -> None:
        self._rewards = rewards
        self._can_requeue = can_requeue
        self._gate = gate
        self.position = 0
        self.version = 0
        self.back: list[str] = []
        self.attempts: dict[str, int] = {}
        self.taken: list[str] = []
        self.error: BaseException | None = None
        self.closed = 0
        self.completed = self.safe = False
        self.drawn: list[str] = []
        self.requests: list[int] = []
        self.calls: list[list[str]] = []
        self.failing: set[str] = set()
        self._held: set[str] = set()
        self._open: dict[int, str] = {}
        self._changed = threading.Condition()
        self._failing_calls = 1 << 30

    def fail(self, error: BaseException, *, calls: int = 1 << 30) -> None:
        """The first so many calls raise this where they are under way, and when they come."""
        with self._changed:
            self.error = error
            self._failing_calls = calls
            self._changed.notify_all()

    def hold(self, *names: str) -> None:
        """Do not finish these until :meth:`let_go`."""
        self._held |= set(names)

    def let_go(self, *names: str) -> None:
        """Finish these; all, if none is named."""
        with self._changed:
            self._held -= set(names) or set(self._held)
            self._changed.notify_all()

    def draw(self, count: int) -> list[Draw]:
        draws = []
        for _ in range(count):
            name = self._name()
            self.drawn.append(name)
            draws.append(Draw(Prompt(id=name, token_ids=(1, 2), text=""), len(self.drawn) - 1))
        with self._changed:
            self._open |= {draw.request: draw.prompt.id for draw in draws}
        return draws

    def roll_out(self, draws: Sequence[Draw], *, deadline: Deadline, done: Done) -> None:
        version, waiting = self.version, {draw.request: index for index, draw in enumerate(draws)}
        with self._changed:
            self._open |= {draw.request: draw.prompt.id for draw in draws}
            call = len(self.calls)
            self.calls.append([draw.prompt.id for draw in draws])
            self.requests += waiting
        try:
            while waiting:
                request = self._next_finished(waiting, call)
                index = waiting.pop(request)
                name = draws[index].prompt.id
                done(index, RewardError("it failed") if name in self.failing else self._group(name, version))
                self._close([request])
        finally:
            self._close([draw.request for draw in draws])

    def _close(self, requests: Sequence[int]) -> None:
        with self._changed:
            self._open = {request: name for request, name in self._open.items() if request not in requests}
            self._changed.notify_all()

    def _next_finished(self, waiting: Mapping[int, int], call: int) -> int:
        """In the order of the draws, over all calls."""

        def ends() -> bool:
            return self.error is not None and call < self._failing_calls

        def first() -> int:
            return min((request for request, name in self._open.items() if name not in self._held), default=-1)

        with self._changed:
            assert self._changed.wait_for(lambda: first() in waiting or ends(), LONG_S)
            if self.error is not None and ends():
                raise self.error
            return first()

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        if self._gate is not None:
            self._gate.acquire()
        if self.error is not None:
            raise self.error
        return [self._next() for _ in range(count)]

    def _next(self) -> Group:
        return self._group(self._name(), self.version)

    def _name(self) -> str:
        if self.back:
            return self.back.pop(0)
        name, self.position = str(self.position), self.position + 1
        return name

    def _group(self, name: str, version: int) -> Group:
        attempt = self.attempts[name] = self.attempts.get(name, -1) + 1
        self.taken.append(name)
        return group(name, self._rewards(name, attempt), version=version)

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        self.back += [prompt.id for prompt in prompts]
        return self._can_requeue

    def report_version(self, version: int) -> None:
        self.version = version

    def counters(self) -> dict[str, float]:
        return {"taken": float(len(self.taken))}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "drawn": len(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.drawn = ["?"] * state.get("drawn", 0)

    def saved(self) -> None:
        self.safe = True

    def complete(self) -> None:
        self.completed = True

    def close(self) -> None:
        self.closed += 1
