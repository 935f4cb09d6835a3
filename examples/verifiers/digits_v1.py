"""Two task sets in one, in the interface of today's verifiers; nothing here knows of the trainer.

``sum``: say the sum of two digits, one answer. ``guess``: find a digit; each wrong guess is answered with ``+`` (it is
larger) or ``=``, and the earlier it is found, the better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf

__all__ = ["DigitsEnv", "DigitsTaskset"]

MAX_GUESSES = 3


class DigitsData(vf.TaskData):
    kind: str
    answer: str


class DigitsConfig(vf.TasksetConfig):
    kind: Literal["sum", "guess"] = "sum"


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right answer; of several guesses, a third less for each wrong one."""
        said = [(message.content or "").strip() for message in trace.assistant_messages]
        if self.data.answer not in said:
            return 0.0
        return 1.0 - said.index(self.data.answer) / MAX_GUESSES

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> Iterator[DigitsTask]:
        if self.config.kind == "guess":
            for answer in range(10):
                yield DigitsTask(DigitsData(prompt="0+9=", kind="guess", answer=str(answer)), self.config.task)
            return
        for a in range(10):
            for b in range(10):
                data = DigitsData(prompt=f"{a}+{b}=", kind="sum", answer=str(a + b)[::-1])
                yield DigitsTask(data, self.config.task)


class DigitsEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class DigitsEnv(vf.Env[DigitsEnvConfig]):
    async def run(self, task: DigitsTask, agents: vf.Agents) -> None:
        if task.data.kind == "sum":
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(MAX_GUESSES - 1):
                guess = said.last_reply.strip()
                if said.terminated or guess == task.data.answer or not guess.isdecimal():
                    break
                said = await talk.turn("+" if int(guess) < int(task.data.answer) else "=")
