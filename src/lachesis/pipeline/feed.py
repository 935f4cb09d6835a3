"""What the loop sees of the pipeline: the next batch, and a way to say that it was used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lachesis.deadline import Deadline
from lachesis.pipeline.buffer import Slots
from lachesis.rollouts.base import RolloutSource
from lachesis.types import Group

BatchT = TypeVar("BatchT")


class Feed(ABC, Generic[BatchT]):
    """Yields packed batches; back-pressure, staleness and deadlines live behind it."""

    @abstractmethod
    def next(self) -> BatchT:
        """The next batch.

        Raises:
            DeadlineExceeded: it was not there in time; the message names who waited for whom.
        """

    @abstractmethod
    def advance(self, step: int) -> None:
        """The batch was trained on and the weights are now those of ``step``: free its slot."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Counts and seconds since the last call."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly. JSON-serializable."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""

    @abstractmethod
    def close(self) -> None:
        """Stop whatever runs in the background. Idempotent."""


class SynchronousFeed(Feed[BatchT]):
    """Generates each batch when it is asked for: every sample is from the current weights.

    Args:
        source: where groups come from.
        prompts_per_step: groups in a batch.
        advantages: sets the advantages of a batch's groups.
        pack: makes a batch of them.
        batch_deadline_s: longest wait for a batch.
    """

    def __init__(
        self,
        *,
        source: RolloutSource,
        prompts_per_step: int,
        advantages: Callable[[Sequence[Group]], list[Group]],
        pack: Callable[[Sequence[Group]], BatchT],
        batch_deadline_s: float,
    ) -> None:
        self._source = source
        self._prompts_per_step = prompts_per_step
        self._advantages = advantages
        self._pack = pack
        self._batch_deadline_s = batch_deadline_s
        self._slots = Slots(1)

    def next(self) -> BatchT:
        deadline = Deadline(
            name=f"the trainer's wait for a batch of {self._prompts_per_step} groups",
            limit_s=self._batch_deadline_s,
            setting="deadlines.batch_s",
        )
        self._slots.acquire(deadline=deadline)
        groups: list[Group] = []
        while len(groups) < self._prompts_per_step:
            groups += self._source.next_groups(self._prompts_per_step - len(groups), deadline=deadline)
            deadline.check(f"{len(groups)} groups are there")
        return self._pack(self._advantages(groups))

    def advance(self, step: int) -> None:
        self._source.report_version(step)
        self._slots.release()

    def counters(self) -> dict[str, float]:
        return self._source.counters()

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state["source"])

    def close(self) -> None:
        self._source.close()
