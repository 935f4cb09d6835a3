"""An environment of today's verifiers that falls over in some rollouts, and whose judge does in others.

Three digits are to be said, and what they are worth follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from tests.contracts.chance import lost, share

__all__ = ["LossyEnv", "LossyTaskset"]


class LossyData(vf.TaskData):
    number: int
    failing: bool


class LossyConfig(vf.TasksetConfig):
    failing: bool = False


class LossyTask(vf.Task[LossyData]):
    @vf.reward
    async def worth(self, trace: vf.Trace) -> float:
        said = [message.content for message in trace.assistant_messages]
        if self.data.failing and lost("judge", said, chance=0.08):
            raise ValueError("the judge fell over")
        return share(said)


class LossyTaskset(vf.Taskset[LossyTask, LossyConfig]):
    def load(self) -> Iterator[LossyTask]:
        for number in range(10):
            data = LossyData(prompt=f"{number}+0=", number=number, failing=self.config.failing)
            yield LossyTask(data, self.config.task)


class LossyEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class LossyEnv(vf.Env[LossyEnvConfig]):
    async def run(self, task: LossyTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            said = [(await talk.turn()).last_reply, (await talk.turn("+")).last_reply]
            if task.data.failing and lost("environment", task.data.number, said, chance=0.08):
                raise OSError("the environment fell over")
            await talk.turn("=")
