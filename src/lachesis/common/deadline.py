"""Named deadlines and retries: every wait says what waits for what, and since when, and gives up at a known moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lachesis.common.errors import DeadlineExceeded

# Seconds for which this process was paused, and the start of a current pause; one tuple, so that both change at once.
_pauses: tuple[float, float | None] = (0.0, None)


@contextmanager
def paused() -> Iterator[None]:
    """Stop the clock of all deadlines of this process while the block runs, because a pause was requested."""
    global _pauses
    total, since = _pauses
    if since is not None:
        raise AssertionError("a process can only be paused once at a time")
    _pauses = (total, time.monotonic())
    try:
        yield
    finally:
        _pauses = (paused_s(), None)


def paused_s() -> float:
    """Return the seconds for which this process has been paused so far."""
    total, since = _pauses
    return total if since is None else total + time.monotonic() - since


@dataclass(frozen=True, slots=True)
class Deadline:
    """A wait with a name and a limit in seconds, counted from its creation or its last progress.

    A pause of the process does not count.

    Args:
        name: the wait in words, as in "feed: generation of 32 prompts by the embedded engine".
        limit_s: seconds after which :meth:`check` raises; ``None`` waits without end.
        setting: the configuration key that holds the limit, named in the error.
        watch: called at each :meth:`check`; an error that it raises ends the wait early.
        outer: the wait that contains this one, and makes progress with it.
    """

    name: str
    limit_s: float | None
    setting: str = ""
    started: float = field(default_factory=time.monotonic)
    watch: Callable[[], None] | None = field(default=None, compare=False)
    paused_before_s: float = field(default_factory=paused_s, compare=False)
    outer: Deadline | None = field(default=None, compare=False)
    _moved: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]], compare=False, repr=False)

    def progressed(self) -> None:
        """Count the limit from now on, because a part of the expected work is done. Any thread may call it."""
        self._moved[:] = [(time.monotonic(), paused_s())]
        if self.outer is not None:
            self.outer.progressed()

    def elapsed_s(self) -> float:
        """Return the seconds since the wait began, pauses included."""
        return time.monotonic() - self.started

    def counted_s(self) -> float:
        """Return the seconds since the last progress, pauses excluded."""
        since, paused_before_s = self._moved[0] if self._moved else (self.started, self.paused_before_s)
        return time.monotonic() - since - (paused_s() - paused_before_s)

    def remaining_s(self) -> float | None:
        """Return the seconds left, never negative; ``None`` without a limit."""
        return None if self.limit_s is None else max(0.0, self.limit_s - self.counted_s())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """List the wait in :func:`waits_now` while the block runs."""
        place = object()
        _under_way[place] = Wait(self, threading.get_ident())
        try:
            yield
        finally:
            del _under_way[place]

    def check(self, detail: str = "") -> None:
        """Raise :class:`DeadlineExceeded` once the limit has passed; ``detail`` is added to the message."""
        if self.watch is not None:
            self.watch()
        if self.limit_s is None or self.counted_s() <= self.limit_s:
            return
        suffix = f"; {detail}" if detail else ""
        remedy = f"raise {self.setting} or find the slow part" if self.setting else "find the slow part"
        what = "made no progress for" if self._moved else "took longer than"
        raise DeadlineExceeded(
            f"{self.name} {what} {self.limit_s:g} s (waiting for {self.elapsed_s():.1f} s){suffix}",
            remedy=remedy,
        )


@dataclass(slots=True)
class Retry:
    """Retries until success or a deadline: the pauses between them, and one message about the failures.

    Args:
        first_s: the first pause in seconds; each later one is twice as long, up to ``longest_s``.
        say: called once, with the reason for a failure.
        told_at: the number of the failure at which ``say`` is called.
    """

    deadline: Deadline
    first_s: float = 0.1
    longest_s: float = 1.0
    say: Callable[[str], None] | None = None
    told_at: int = 1
    failures: int = field(default=0, init=False)

    def after(self, reason: str) -> float:
        """Return the seconds to wait after a try failed for ``reason``; raise as :meth:`Deadline.check` does."""
        self.failures += 1
        if self.say is not None and self.failures == self.told_at:
            self.say(reason)
        self.deadline.check(reason)
        return min(self.longest_s, self.first_s * 2.0 ** min(self.failures - 1, 30))


def wait_until(why_not: Callable[[], str], retry: Retry, *, sleep: Callable[[float], Any] = time.sleep) -> None:
    """Call ``why_not`` until it returns an empty text; until then it returns the reason to keep waiting."""
    while reason := why_not():
        sleep(retry.after(reason))


@dataclass(frozen=True, slots=True)
class Wait:
    """A current wait, and the thread that waits (as ``threading.get_ident()`` returns it)."""

    deadline: Deadline
    thread: int


# Not guarded by a lock, because setting, deleting and copying are single operations of the dict.
_under_way: dict[object, Wait] = {}


# Called before a call that may keep all threads of this process from running, to write its current waits.
waits_writers: list[Callable[[], object]] = []


def waits_now() -> tuple[Wait, ...]:
    """Return the current waits of all threads of this process, in the order in which they began."""
    return tuple(_under_way.copy().values())
