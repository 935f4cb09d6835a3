"""Work on what is there while more is still coming."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lachesis.common.deadline import Deadline

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Overlap(Generic[ItemT, ResultT]):
    """Works on items on a thread of its own while others are still put in.

    A call of ``work`` gets, in their order, all items that are there when it begins, and waits for ``at_least`` of
    them; the last one gets what is left. An error of it is raised to whoever puts in the next item or waits for the
    results.

    As a context manager it ends the thread. A call that is under way then, because what is put in has failed, is
    left to itself: nobody wants its result.

    Args:
        work: from items to a result.
        at_least: fewest items of a call, but for the last.
        name: of the thread.
    """

    def __init__(self, work: Callable[[Sequence[ItemT]], ResultT], *, at_least: int, name: str) -> None:
        self._work = work
        self._at_least = at_least
        self._changed = threading.Condition()
        self._waiting: list[ItemT] = []
        self._given = self._done = 0
        self._results: list[ResultT] = []
        self._error: BaseException | None = None
        self._complete = self._abandoned = self._ended = False
        self._spans: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Overlap[ItemT, ResultT]:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def put(self, item: ItemT) -> None:
        """Give it another item. Returns at once. Raises what ``work`` raised."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiting.append(item)
            self._given += 1
            self._changed.notify_all()

    def results(self, *, deadline: Deadline) -> list[ResultT]:
        """All results, once all that was put in is done; nothing more may be put in.

        Raises:
            DeadlineExceeded: that took too long.
            What ``work`` raised.
        """
        with self._changed:
            self._complete = True
            self._changed.notify_all()
            while not self._ended:
                self._changed.wait(timeout=deadline.remaining_s())
                if not self._ended:
                    deadline.check(f"{self._done} of {self._given} are done")
            if self._error is not None:
                raise self._error
            return self._results

    def seconds(self, *, until: float = math.inf) -> float:
        """Seconds spent on work, up to a moment of ``time.monotonic()``."""
        return sum(max(0.0, min(end, until) - start) for start, end in self._spans)

    def _run(self) -> None:
        try:
            while items := self._take():
                started = time.monotonic()
                result = self._work(items)
                with self._changed:
                    self._spans.append((started, time.monotonic()))
                    self._results.append(result)
                    self._done += len(items)
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _take(self) -> list[ItemT]:
        """What the next call gets; nothing where there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._complete or len(self._waiting) >= self._at_least)
            taken, self._waiting = self._waiting, []
            return [] if self._abandoned else taken
