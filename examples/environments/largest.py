"""One answer a problem: the largest digit of a few. ``4+7+1=`` wants ``7``.

lachesis env examples/environments/largest.py:Largest process --openai.base_url http://127.0.0.1:9001
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from lachesis.environments.base import SingleTurn
from lachesis.environments.records import Trajectory
from lachesis.environments.settings import EnvironmentConfig
from pydantic import Field

from lachesis.common.types import Message


@dataclass(frozen=True, slots=True)
class Digits:
    """A problem and its answer, both as text."""

    question: str
    answer: str


class LargestConfig(EnvironmentConfig):
    """The section ``env``: every field is a flag, ``--env.digits 4``. What is not here has the usual default."""

    group_size: int = Field(8, ge=1, description="completions of one problem, scored against each other")
    max_token_length: int = Field(64, ge=1, description="most tokens of a rollout, prompt included")
    max_new_tokens: int | None = Field(2, ge=1, description="most tokens of a completion")
    digits: int = Field(3, ge=2, le=20, description="how many digits a problem has")


class Largest(SingleTurn[Digits, LargestConfig]):
    """A score of 1 for the largest digit and nothing else, and half of it where something follows."""

    name = "largest"
    config_class = LargestConfig

    async def setup(self) -> None:
        self._train = self._problems(seed=self.config.seed, held_out=False)

    async def get_next_item(self) -> Digits:
        return next(self._train)

    def held_out(self) -> Sequence[Digits]:
        return list(islice(self._problems(seed=0, held_out=True), self.config.eval_num))

    def prompt(self, item: Digits) -> tuple[Sequence[int], Sequence[Message]]:
        return self.tokenizer.encode(item.question), [{"role": "user", "content": item.question}]

    async def score(self, item: Digits, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        answers = [str(trajectory.messages[-1]["content"]) for trajectory in trajectories]
        return [1.0 if answer == item.answer else 0.5 * answer.startswith(item.answer) for answer in answers]

    def _problems(self, *, seed: int, held_out: bool) -> Iterator[Digits]:
        """Without end. A sum of digits that 5 divides is held out, so no problem is ever in both."""
        source = random.Random(seed)
        while True:
            digits = [source.randrange(10) for _ in range(self.config.digits)]
            if (sum(digits) % 5 == 0) == held_out:
                yield Digits("+".join(map(str, digits)) + "=", str(max(digits)))
