"""SFT warm start: batches of given answers, followed by those of the feed that generates.

The loop is unaware of it, so weights travel to the engine after these steps too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lachesis.common.errors import CheckpointError, DataError
from lachesis.common.types import UNKNOWN_VERSIONS, Group, Prompt, Sample
from lachesis.pipeline.feed import FeedBefore
from lachesis.train.batch import Batch


def demonstrations(
    problems: Sequence[Prompt], *, column: str, encode: Callable[[str], list[int]], end: int, longest: int
) -> list[Group]:
    """Return a group of one sample for each problem: its answer and the end token, all trained on.

    Args:
        column: of the answer.
        encode: converts a text to tokens, without special ones.
        end: the end token.
        longest: the model's limit of tokens.

    Raises:
        DataError: a problem has no answer, or one that is too long.
    """
    groups: list[Group] = []
    for problem in problems:
        answer = problem.columns.get(column)
        if not isinstance(answer, str) or not answer:
            raise DataError(
                f"problem {problem.id} has no text in the column {column!r} that sft.column names; it has "
                f"{', '.join(problem.columns) or 'no columns'}",
                remedy="set sft.column to the column with the answers, or sft.path to data that has them",
            )
        ids = (*encode(answer), end)
        if len(problem.token_ids) + len(ids) > longest:
            raise DataError(
                f"problem {problem.id} and its answer have {len(problem.token_ids) + len(ids)} tokens, but the model "
                f"takes at most {longest}",
                remedy="remove it with data.filter, or shorten it",
            )
        unknown = (math.nan,) * len(ids)
        sample = Sample(problem.token_ids, ids, unknown, "stop", UNKNOWN_VERSIONS, text=answer, advantage=1.0)
        groups.append(Group(problem, (sample,)))
    return groups


@dataclass(eq=False)
class StartedFeed(FeedBefore[Batch]):
    """Feed of a number of batches of answers, in a new order each epoch, followed by another feed.

    Args:
        feed: feed after the start.
        answers: data of the start.
        steps: number of its batches.
        batch_size: answers in each.
        pack: makes a batch of groups.
        seed: of the order.
    """

    answers: Sequence[Group]
    steps: int
    batch_size: int
    pack: Callable[[Sequence[Group]], Batch]
    seed: int = 0
    _done: int = field(default=0, init=False)

    def next(self) -> Batch:
        if self._done >= self.steps:
            return self.feed.next()
        first = self._done * self.batch_size
        batch = self.pack([self._answer(first + place) for place in range(self.batch_size)])
        return replace(batch, groups=(), objective="sft")  # answers are not rollouts

    def _answer(self, number: int) -> Group:
        """Return the answer of this number, counted over all epochs."""
        epoch, place = divmod(number, len(self.answers))
        order = [*range(len(self.answers))]
        random.Random(f"{self.seed}:sft:{epoch}").shuffle(order)
        return self.answers[order[place]]

    def advance(self, step: int) -> None:
        if self._done < self.steps:
            self._done += 1
        else:
            self.feed.advance(step)

    def state_dict(self) -> dict[str, Any]:
        return self.feed.state_dict() | {"sft_steps": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises CheckpointError if the run had no such start."""
        if "sft_steps" not in state:
            raise CheckpointError(
                "the checkpoint's run had no supervised start", remedy="resume with the run.stages of that run"
            )
        self.feed.load_state_dict(state)
        self._done = int(state["sft_steps"])
