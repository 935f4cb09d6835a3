"""Generation ahead of training: a thread fills a queue of batches, the trainer takes them in order."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import LachesisError
from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.types import Group
from lachesis.pipeline.collect import Collector
from lachesis.pipeline.feed import BatchT, Feed, Finisher
from lachesis.pipeline.filters import fresh
from lachesis.pipeline.slots import Slots

_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of one batch, what collecting them counted, and where the collector stood after them."""

    groups: list[Group]
    counts: dict[str, float]
    state: dict[str, Any]


@dataclass(kw_only=True, eq=False)
class AsynchronousFeed(Feed[BatchT]):
    """While the trainer works on one batch, up to ``depth`` others are generated and scored.

    A batch holds a slot from the start of its generation until the step that trained on it is done, so ``1 +
    depth`` slots bound memory and staleness alike. Groups that would be older than ``max_staleness`` at the last
    of the steps that use them are dropped and counted, and the batch is filled up from the next one.

    Counts and seconds are those of the batches that a step took, not of what was generated meanwhile.

    What is resumed from a checkpoint is the state after the last batch that was taken: batches still in the
    queue are generated again, with the weights of then.

    Args:
        collector: gathers groups; only the producing thread uses it once that runs.
        finisher: makes batches; only the caller's thread uses it.
        depth: batches generated ahead.
        max_staleness: in weight versions; ``None`` drops nothing.
        uses: optimizer steps on each batch, between which this feed is not asked.
    """

    collector: Collector
    finisher: Finisher[BatchT]
    depth: int
    max_staleness: int | None
    batch_deadline_s: float
    uses: int = 1

    def __post_init__(self) -> None:
        self._count = self.collector.count
        self._slots = Slots(1 + self.depth)
        self._queue: queue.SimpleQueue[Collected | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._state = self.collector.state_dict()
        self._counts: dict[str, float] = {}
        self._left: list[Group] = []
        self._version = 0
        self._opened = 0  # slots held by the batch that is trained on: 0 or 1
        self._dropped = 0

    def next(self) -> BatchT:
        """The next batch of fresh groups. Errors of the producing thread are raised here."""
        name = "the trainer's wait for a batch that is generated ahead"
        deadline = Deadline(name, self.batch_deadline_s, "deadlines.batch_s")
        self._start()
        groups = self._take_fresh(self._left)
        while len(groups) < self._count:
            collected = self._wait(deadline, have=len(groups))
            if self._opened:
                # The batch before was too stale to fill this one: holding its slot would starve the producer.
                self._slots.release()
            self._opened = 1
            self._state = collected.state
            self._add(collected.counts)
            groups += self._take_fresh(collected.groups)
        groups, self._left = groups[: self._count], groups[self._count :]
        return self.finisher.finish(groups)

    def _take_fresh(self, groups: list[Group]) -> list[Group]:
        last_use = self._version + self.uses - 1
        kept = fresh(groups, version=last_use, max_staleness=self.max_staleness)
        self._dropped += len(groups) - len(kept)
        return kept

    def _add(self, counts: dict[str, float]) -> None:
        """Add what a batch counted; of what reward functions logged, which are means, the last one's stand."""
        added = {name: n + self._counts.get(name, 0.0) for name, n in counts.items() if not _is_mean(name)}
        self._counts |= counts | added

    def _wait(self, deadline: Deadline, *, have: int) -> Collected:
        try:
            with deadline.waiting():
                item = self._queue.get(timeout=deadline.remaining_s())
        except queue.Empty:
            deadline.check(f"{have} of {self._count} groups are there, {self._slots.taken} batches are under way")
            raise
        if isinstance(item, BaseException):
            self._thread = None
            raise item
        return item

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="lachesis-producer", daemon=True)
            self._thread.start()

    def _produce(self) -> None:
        """Until stopped or failed: take a slot, collect a batch, queue it."""
        while True:
            self._slots.acquire(deadline=Deadline(name="the producer's wait for the trainer", limit_s=None))
            if self._stopping.is_set():
                return
            try:
                self._queue.put(self._collect())
            except BaseException as error:  # raised again where the batch is waited for, which may try anew
                if self._stopping.is_set():
                    return
                self._slots.release()
                self._queue.put(error)
                return

    def _collect(self) -> Collected:
        deadline = Deadline("the generation of a batch ahead of training", self.batch_deadline_s, "deadlines.batch_s")
        with deadline.waiting():
            groups = self.collector.collect(deadline=deadline)
        return Collected(groups=groups, counts=self.collector.counters(), state=self.collector.state_dict())

    def advance(self, step: int) -> None:
        self._version = step
        self.collector.report_version(step)
        if self._opened:
            self._slots.release()
        self._opened = 0

    def counters(self) -> dict[str, float]:
        dropped, self._dropped = self._dropped, 0
        counts = self._counts
        self._counts = {name: 0.0 for name in counts if not _is_mean(name)}
        mine = {"stale_groups": float(dropped), "batches_ahead": float(self._queue.qsize())}
        return counts | self.finisher.counters() | mine

    def state_dict(self) -> dict[str, Any]:
        left = [encode_group(group) for group in self._left]
        return self._state | self.finisher.state_dict() | {"left": left, "version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch only. Raises LachesisError once generation has begun."""
        if self._thread is not None:
            raise LachesisError("a feed that runs cannot be resumed", remedy="resume before the first batch")
        self.collector.load_state_dict(state)
        self.finisher.load_state_dict(state)
        self._left = [decode_group(line) for line in state.get("left", [])]
        if "version" in state:  # the collector's state is of when the batch was generated
            self._version = int(state["version"])
            self.collector.report_version(self._version)
        self._state = self.collector.state_dict()

    def close(self) -> None:
        """Stop producing; a generation under way is given a few seconds to end, and left behind if it does not."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._slots.release_all()
            thread.join(timeout=_JOIN_S)
        self.collector.close()


def _is_mean(counter: str) -> bool:
    return counter.startswith("reward_metrics/")
