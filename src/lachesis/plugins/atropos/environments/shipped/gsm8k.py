"""GSM8K: grade-school problems in words from files or the hub, scored by math-verify on the boxed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from lachesis.common.errors import DataError
from lachesis.common.types import Message
from lachesis.plugins.atropos.environments.base import SingleTurn, endless
from lachesis.plugins.atropos.environments.records import Trajectory
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from lachesis.plugins.atropos.environments.shipped.math_scoring import MathScorer
from lachesis.plugins.atropos.environments.tokenizer import chat_prompt
from lachesis.rollouts.datasets.rows import Row, is_hub_name, read_file, read_library

_REMEDY = "give a directory with train and test as .jsonl or .parquet, such a file, or a name on the hub"
_INSTRUCTION = "Solve the problem step by step. Write the final number in \\boxed{}."


@dataclass(frozen=True, slots=True)
class MathProblem:
    """A question in words and its final answer, a number as text."""

    question: str
    answer: str


def load_split(data: str, split: str) -> list[MathProblem]:
    """Load the problems of ``split``, "train" or "test".

    Args:
        data: a directory that has files of the split (also one laid out as on the hub, with ``main/`` in it), a
            single file, which is every split, or the name of a dataset on the hub or in its cache.
        split: name of the split.

    Raises:
        DataError: it does not exist, cannot be read, or a row of it is not a problem of GSM8K.
    """
    place = Path(data).expanduser()
    if place.is_file():
        rows = read_file(place)
    elif place.is_dir():
        rows = [row for path in _files_of(place, split) for row in read_file(path)]
    elif is_hub_name(data):
        rows, _ = read_library(data, name="main", split=split)
    else:
        raise DataError(f"there is no GSM8K at {data}", remedy=_REMEDY)
    return list(map(_problem, rows))


def _files_of(directory: Path, split: str) -> list[Path]:
    for folder in (directory, directory / "main", directory / "data"):
        for suffix in (".jsonl", ".parquet"):
            found = sorted({*folder.glob(f"{split}{suffix}"), *folder.glob(f"{split}-*{suffix}")})
            if found:
                return found
    raise DataError(f"{directory} has no file of the split {split}", remedy=_REMEDY)


def _problem(row: Row) -> MathProblem:
    question, solution = row.columns.get("question"), row.columns.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str) or "####" not in solution:
        raise DataError(f"{row.place}: not a GSM8K problem", remedy='give "question", and "answer" with "#### 42"')
    return MathProblem(question, solution.rpartition("####")[2].strip().replace(",", ""))


class Gsm8kConfig(EnvironmentConfig):
    """The section ``env`` of ``gsm8k``."""

    data: str = Field("openai/gsm8k", description="directory, .jsonl or .parquet file, or name on the hub")
    score_workers: int = Field(1, ge=1, description="processes that compare answers")


class Gsm8k(SingleTurn[MathProblem, Gsm8kConfig]):
    """GSM8K without examples in the prompt; a score of 1 if the boxed answer equals the right one, else 0."""

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
        """Return the number of answers that could not be compared in time."""
        timeouts, self._scorer.timeouts = self._scorer.timeouts, 0
        return {"score/timeouts": float(timeouts)}
