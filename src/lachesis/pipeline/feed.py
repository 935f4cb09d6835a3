"""Feeds: the trainer's view of the pipeline, which yields batches and is told when one was used."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lachesis.common.deadline import Deadline
from lachesis.common.types import Group
from lachesis.pipeline.admission import prompts_in_line
from lachesis.pipeline.collect import Collector
from lachesis.pipeline.replay import ReplayBuffer
from lachesis.rollouts.base import ResumablePart

BatchT = TypeVar("BatchT")


class Feed(ResumablePart, Generic[BatchT]):
    """Source of packed batches; back-pressure, staleness and deadlines are handled behind it."""

    @abstractmethod
    def next(self) -> BatchT:
        """Return the next batch.

        Raises:
            DeadlineExceeded: it was not ready in time; the message names who waited for whom.
        """

    @abstractmethod
    def advance(self, step: int) -> None:
        """Free the slots of the batch just trained on; the weights are now those of ``step``."""


@dataclass(eq=False)
class FeedBefore(Feed[BatchT]):
    """Feed that takes from another feed, and passes on its counters, notices and end."""

    feed: Feed[BatchT]

    def counters(self) -> dict[str, float]:
        return self.feed.counters()

    def saved(self) -> None:
        self.feed.saved()

    def complete(self) -> None:
        self.feed.complete()

    def close(self) -> None:
        self.feed.close()


@dataclass(kw_only=True, eq=False)
class Finisher(Generic[BatchT]):
    """Last stage of the pipeline, which turns the groups of a batch into the packed batch."""

    advantages: Callable[[Sequence[Group]], list[Group]]
    pack: Callable[[Sequence[Group]], BatchT]
    # Adds the logprobs of a teacher outside the trainer.
    teach: Callable[[Sequence[Group]], Sequence[Group]] = list
    replay: ReplayBuffer | None = None
    _replayed: int = field(default=0, init=False)

    def finish(self, groups: Sequence[Group]) -> BatchT:
        """Apply replay, compute advantages, add teacher logprobs, and pack.

        Raises:
            RewardError: no sample has a reward.
        """
        if self.replay is not None:
            groups = self.replay.mix(groups)
            self._replayed += sum(group.replayed for group in groups)
        return self.pack(self.teach(self.advantages(groups)))

    def counters(self) -> dict[str, float]:
        """Return ``replayed_groups`` since the last call, where replay is on."""
        replayed, self._replayed = self._replayed, 0
        return {} if self.replay is None else {"replayed_groups": float(replayed)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the replay buffer."""
        return {} if self.replay is None else {"replay": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; empty if the checkpoint was made without replay."""
        if self.replay is not None and "replay" in state:
            self.replay.load_state_dict(state["replay"])


@dataclass(kw_only=True, eq=False)
class CollectedFeed(Feed[BatchT]):
    """Feed of a collector's groups, which a finisher makes into batches."""

    collector: Collector
    finisher: Finisher[BatchT]
    batch_deadline_s: float

    def counters(self) -> dict[str, float]:
        return self.collector.counters() | self.finisher.counters()

    def state_dict(self) -> dict[str, Any]:
        return self.collector.state_dict() | self.finisher.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state)
        self.finisher.load_state_dict(state)

    def saved(self) -> None:
        self.collector.source.saved()

    def complete(self) -> None:
        self.collector.source.complete()

    def close(self) -> None:
        self.collector.close()


class SynchronousFeed(CollectedFeed[BatchT]):
    """Feed that generates each batch on request, so that every sample is from the current weights."""

    def next(self) -> BatchT:
        name = f"the trainer's wait for a batch of {self.collector.count} groups"
        deadline = Deadline(name, self.batch_deadline_s, "deadlines.batch_s")
        with deadline.waiting():
            return self.finisher.finish(self.collector.collect(deadline=deadline))

    def advance(self, step: int) -> None:
        self.collector.report_version(step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        If the run generated ahead, the prompts that were in line come first.
        """
        super().load_state_dict(state)
        if "line" in state:
            self.collector.source.requeue(prompts_in_line(state["line"]))
