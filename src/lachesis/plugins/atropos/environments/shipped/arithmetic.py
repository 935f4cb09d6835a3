"""Addition of two numbers below 100, the answer's least significant digit first: ``37+45=`` wants ``28``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from lachesis.common.types import Message
from lachesis.plugins.atropos.environments.base import SingleTurn, endless
from lachesis.plugins.atropos.environments.records import Trajectory
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig

HELD_OUT = 512


@dataclass(frozen=True, slots=True)
class Sum:
    """A problem and its answer, both as text."""

    prompt: str
    answer: str


class ArithmeticConfig(EnvironmentConfig):
    """The section ``env`` of ``arithmetic``: short rollouts, and an evaluation on all held-out problems."""

    group_size: int = Field(8, ge=1, description="completions of one problem, scored against each other")
    max_token_length: int = Field(64, ge=1, description="most tokens of a rollout, prompt included")
    max_new_tokens: int | None = Field(6, ge=1, description="most tokens of a completion")
    eval_num: int = Field(HELD_OUT, ge=1, description="most held-out problems of an evaluation")


class Arithmetic(SingleTurn[Sum, ArithmeticConfig]):
    """The quickstart's task as an environment: a score of 1 if the completion is exactly the answer, else 0."""

    name = "arithmetic"
    config_class = ArithmeticConfig

    async def setup(self) -> None:
        train, self._held_out = problems(seed=0)
        self._order = endless(train[: self.config.max_num], seed=self.config.seed)

    async def get_next_item(self) -> Sum:
        return next(self._order)

    def held_out(self) -> Sequence[Sum]:
        return self._held_out[: self.config.eval_num]

    def prompt(self, item: Sum) -> tuple[Sequence[int], Sequence[Message]]:
        return self.tokenizer.encode(item.prompt), [{"role": "user", "content": item.prompt}]

    async def score(self, item: Sum, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [float(trajectory.messages[-1]["content"] == item.answer) for trajectory in trajectories]


def problems(*, seed: int) -> tuple[list[Sum], list[Sum]]:
    """Return all sums of two numbers below 100, shuffled: those to train on, and those held out."""
    sums = [Sum(f"{a}+{b}=", str(a + b)[::-1]) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]
