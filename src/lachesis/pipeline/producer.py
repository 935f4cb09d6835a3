"""Generation beside training, group by group: a group begins when a slot is free, a step when its batch is complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError, RewardError
from lachesis.common.types import Group
from lachesis.metrics.meters import Seconds, TimeAverage
from lachesis.pipeline.admission import Admission, Place
from lachesis.pipeline.feed import BatchT, CollectedFeed
from lachesis.rollouts.base import GroupwiseSource
from lachesis.rollouts.prompt_source import MOST_EMPTY_BATCHES, all_failed

_JOIN_S = 10.0


@dataclass(eq=False)
class _Call:
    """Call to the engine for several groups at once, and the thread that waits for it.

    ``era`` is the era of the engine in which the call began. An error counts only in its own era: when an engine dies,
    every call under way fails; once the engine was recovered or restarted with new weights, the lost groups are
    requested again and the remaining errors are ignored.
    """

    places: Sequence[Place]
    thread: threading.Thread
    era: int


@dataclass(kw_only=True, eq=False)
class AsynchronousFeed(CollectedFeed[BatchT]):
    """Feed that generates and scores later groups while the trainer works on a batch.

    Each group is on its own from admission to batch (:class:`Admission` says when it may begin, and when a batch is
    complete). Whenever slots are free, prompts for them are drawn and requested, at most a batch in one call; calls
    overlap, and weights may change during them. No finished group is dropped, except those that the collector sets
    aside.

    A checkpoint records the line: finished groups are restored unchanged, the others are generated again.

    Args:
        source: where groups come from; also the collector's.
        collector: decides which groups are sampled again.
        finisher: makes batches, in the caller's thread.
        ahead: batches generated ahead.
        at_once: largest number of calls at a time; ``None`` leaves only the slots as a bound.
        clock: seconds.
    """

    source: GroupwiseSource
    ahead: int
    at_once: int | None = None
    clock: Seconds = time.monotonic

    def __post_init__(self) -> None:
        self._line = Admission(size=self.collector.count, ahead=self.ahead)
        self._idle_slots = TimeAverage(self.clock)
        self._changed = threading.Condition()  # guards the line and all attributes below
        self._calls: dict[int, _Call] = {}  # by the number of each place that is being generated
        self._error: BaseException | None = None
        self._era = 0
        self._dropped: list[RewardError] = []  # in a row
        self._running = self._closed = False

    def next(self) -> BatchT:
        """Return the next batch.

        Errors of generation and scoring are raised here; after one, the batch can be requested again.
        """
        name = "the trainer's wait for a batch that is generated ahead"
        deadline = Deadline(name, self.batch_deadline_s, "deadlines.batch_s")
        with deadline.waiting(), self._changed:
            self._running = True
            self._send()
            while not self._line.ready():
                self._raise_error()
                self._changed.wait(timeout=deadline.remaining_s())
                deadline.check(self._where())
            groups = self._line.take()
        return self.finisher.finish(groups)

    def advance(self, step: int) -> None:
        with self._changed:
            self.collector.report_version(step)
            self.collector.requeue()
            self._line.train()
            self._era += 1
            if isinstance(self._error, EngineError):
                self._error = None
            self._send()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            self._era += 1
            self._running = False  # until the next batch is requested
            raise error

    def _where(self) -> str:
        there, generating = len(self._line.finished), len(self._calls)
        return f"{there} of {self._line.size} groups are complete, {generating} others are in progress"

    def _send(self) -> None:
        """Request all groups that may be generated and are not yet under way."""
        while self._running and not self._closed and self._error is None and self._may_call():
            count = min(self._line.room, self._line.size)
            self._line.admit(self.source.draw(count))
            places = [place for place in self._line.unfinished if place.number not in self._calls]
            if not places:
                break
            self._begin(places[: self._line.size])
        self._idle_slots.change(self._line.room)

    def _may_call(self) -> bool:
        return self.at_once is None or len(set(map(id, self._calls.values()))) < self.at_once

    def _begin(self, places: Sequence[Place]) -> None:
        thread = threading.Thread(target=lambda: self._roll_out(call), name="lachesis-generation", daemon=True)
        call = _Call(places, thread, self._era)
        self._calls |= dict.fromkeys((place.number for place in places), call)
        thread.start()

    def _roll_out(self, call: _Call) -> None:
        name = f"the generation of {len(call.places)} groups ahead of training"
        deadline = Deadline(name, self.batch_deadline_s, "deadlines.batch_s")
        error: BaseException | None = None
        try:
            with deadline.waiting():
                self.source.roll_out(
                    [place.draw for place in call.places],
                    deadline=deadline,
                    done=lambda index, outcome: self._settle(call, call.places[index], outcome),
                )
        except BaseException as failure:  # raised again to the caller that waits for the batch, which may retry
            error = failure
        with self._changed:
            self._end(call, error)

    def _end(self, call: _Call, error: BaseException | None) -> None:
        """Forget the call, so that groups that it did not deliver are requested again."""
        self._calls = {number: one for number, one in self._calls.items() if one is not call}
        if error is not None and (call.era == self._era or not isinstance(error, EngineError)):
            self._error = self._error or error
        self._send()
        self._changed.notify_all()

    def _settle(self, call: _Call, place: Place, outcome: Group | RewardError) -> None:
        with self._changed:
            if self._calls.get(place.number) is not call:
                return  # a late answer of a failed call: the group was requested again
            if self._closed:
                raise LachesisError("the run has ended while groups were generated")
            del self._calls[place.number]
            if isinstance(outcome, RewardError):
                self._drop(place, outcome)
            else:
                self._dropped.clear()
                self._place(place, outcome)
            self._send()
            self._changed.notify_all()

    def _drop(self, place: Place, error: RewardError) -> None:
        self._line.leave(place.number)
        self._dropped.append(error)
        if len(self._dropped) >= MOST_EMPTY_BATCHES * self._line.size:
            self._error = all_failed(len(self._dropped), error)
            self._dropped.clear()

    def _place(self, place: Place, group: Group) -> None:
        if self.collector.keeps(group, tries=place.tries):
            self._line.finish(place.number, group)
        else:
            self._line.leave(place.number)
            self._line.admit(self.source.draw(1), tries=place.tries + 1)

    def counters(self) -> dict[str, float]:
        with self._changed:
            mine = {"idle_slots": self._idle_slots.take(), "groups_waiting": float(len(self._line.finished))}
            return super().counters() | mine

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint that is about to be written."""
        with self._changed:
            return super().state_dict() | {"line": self._line.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, before the first batch.

        Raises:
            LachesisError: generation has begun.
        """
        if self._running:
            raise LachesisError("a running feed cannot be resumed", remedy="resume before the first batch")
        super().load_state_dict(state)
        if "line" in state:
            self._line.load_state_dict(state["line"])

    def close(self) -> None:
        """Stop generating; calls under way get a few seconds to end, and are abandoned otherwise."""
        with self._changed:
            self._closed = True
            threads = {call.thread for call in self._calls.values()}
        deadline = Deadline("the end of generation", _JOIN_S)
        for thread in threads:
            thread.join(timeout=deadline.remaining_s())
        super().close()
