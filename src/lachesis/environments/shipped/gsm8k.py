"""GSM8K: grade-school problems in words, scored by math-verify on the boxed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import Field

from lachesis.common.types import Message
from lachesis.environments.base import SingleTurn, endless
from lachesis.environments.records import Trajectory
from lachesis.environments.settings import EnvironmentConfig
from lachesis.environments.shipped.gsm8k_data import MathProblem, load_split
from lachesis.environments.shipped.math_scoring import MathScorer
from lachesis.environments.tokenizer import chat_prompt

_INSTRUCTION = "Solve the problem step by step. Write the final number in \\boxed{}."


class Gsm8kConfig(EnvironmentConfig):
    """The section ``env`` of ``gsm8k``."""

    data: str = Field("openai/gsm8k", description="directory, .jsonl or .parquet file, or name on the hub")
    score_workers: int = Field(1, ge=1, description="processes that compare answers")


class Gsm8k(SingleTurn[MathProblem, Gsm8kConfig]):
    """No examples in the prompt; a score of 1 where the boxed answer equals the right one, else 0."""

    name = "gsm8k"
    config_class = Gsm8kConfig

    async def setup(self) -> None:
        train = await asyncio.to_thread(load_split, self.config.data, "train")
        self._test = await asyncio.to_thread(load_split, self.config.data, "test")
        self._order = endless(train[: self.config.max_num], seed=self.config.seed)
        self._scorer = MathScorer(workers=self.config.score_workers)
        await self._scorer.start()

    async def close(self) -> None:
        if hasattr(self, "_scorer"):
            await self._scorer.close()

    async def get_next_item(self) -> MathProblem:
        return next(self._order)

    def held_out(self) -> Sequence[MathProblem]:
        return self._test[: self.config.eval_num]

    def prompt(self, item: MathProblem) -> tuple[Sequence[int], Sequence[Message]]:
        messages = [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": item.question}]
        plain = f"{_INSTRUCTION}\n\nProblem: {item.question}\nSolution:"
        return chat_prompt(self.tokenizer, messages, plain=plain), messages

    async def score(self, item: MathProblem, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        answers = [str(trajectory.messages[-1]["content"]) for trajectory in trajectories]
        return await self._scorer.score(item.answer, answers)

    def metrics(self) -> dict[str, float]:
        """Answers that could not be compared in time."""
        timeouts, self._scorer.timeouts = self._scorer.timeouts, 0
        return {"score/timeouts": float(timeouts)}
