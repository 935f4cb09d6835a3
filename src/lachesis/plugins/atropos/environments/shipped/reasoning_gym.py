"""Tasks of reasoning-gym over the rollout API, scored by the library itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import Field

from lachesis.common.types import Message
from lachesis.plugins.atropos.environments.base import SingleTurn, endless
from lachesis.plugins.atropos.environments.records import Trajectory
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from lachesis.plugins.atropos.environments.tokenizer import chat_prompt
from lachesis.plugins.environments import reasoning_gym as library

Entry = Mapping[str, Any]


class ReasoningGymConfig(EnvironmentConfig):
    """The section ``env`` of ``reasoning_gym``."""

    tasks: str = Field("chain_sum", description="tasks with their options: chain_sum?max_terms=3&size=500,leg_counting")


class ReasoningGym(SingleTurn[Entry, ReasoningGymConfig]):
    """Problems of the named tasks; as many, from another seed, are held out."""

    name = "reasoning_gym"
    config_class = ReasoningGymConfig

    async def setup(self) -> None:
        self._tasks = library.parse_tasks(self.config.tasks)
        train = [entry for task in self._tasks for entry in await asyncio.to_thread(list, library.entries(task))]
        self._order = endless(train[: self.config.max_num], seed=self.config.seed)

    async def get_next_item(self) -> Entry:
        return next(self._order)

    def held_out(self) -> Sequence[Entry]:
        others = [library.entries(replace(task, seed=task.seed + 1)) for task in self._tasks]
        each = -(-self.config.eval_num // len(others))
        return [entry for entries in others for entry in islice(entries, each)][: self.config.eval_num]

    def prompt(self, item: Entry) -> tuple[Sequence[int], Sequence[Message]]:
        messages = [{"role": "user", "content": item["question"]}]
        return chat_prompt(self.tokenizer, messages, plain=str(item["question"])), messages

    async def score(self, item: Entry, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        answers = [str(trajectory.messages[-1]["content"]) for trajectory in trajectories]
        return await asyncio.to_thread(lambda: [library.score_answer(item, answer) for answer in answers])
