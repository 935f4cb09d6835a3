"""Sources and groups for the tests of the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.rollouts.base import RolloutSource

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


class ScriptedSource(RolloutSource):
    """Prompts numbered from 0 (or put back), rewards from a function of the prompt's name and how often it came.

    ``version`` is what its samples say. Where ``gate`` is given, every call waits for it.
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

    def next_groups(self, count: int, *, deadline: Deadline) -> list[Group]:
        if self._gate is not None:
            self._gate.acquire()
        if self.error is not None:
            raise self.error
        return [self._next() for _ in range(count)]

    def _next(self) -> Group:
        if self.back:
            name = self.back.pop(0)
        else:
            name, self.position = str(self.position), self.position + 1
        attempt = self.attempts[name] = self.attempts.get(name, -1) + 1
        self.taken.append(name)
        return group(name, self._rewards(name, attempt), version=self.version)

    def requeue(self, prompts: Sequence[Prompt]) -> bool:
        self.back += [prompt.id for prompt in prompts]
        return self._can_requeue

    def report_version(self, version: int) -> None:
        self.version = version

    def counters(self) -> dict[str, float]:
        return {"taken": float(len(self.taken))}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def close(self) -> None:
        self.closed += 1
