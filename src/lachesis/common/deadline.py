"""Named deadlines: every wait says who waits for what, since when, and gives up at a known moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lachesis.common.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """A wait with a name and a limit in seconds, counted from its creation.

    Args:
        name: who waits for whom, as in "feed: generation of 32 prompts by the embedded engine".
        limit_s: seconds after which :meth:`check` raises; ``None`` waits without end.
        setting: the configuration key that holds the limit, named in the error.
        watch: called at each :meth:`check`; what it raises ends the wait before its time.
    """

    name: str
    limit_s: float | None
    setting: str = ""
    started: float = field(default_factory=time.monotonic)
    watch: Callable[[], None] | None = field(default=None, compare=False)

    def elapsed_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.started

    def remaining_s(self) -> float | None:
        """Seconds left, never negative; ``None`` where there is no limit."""
        return None if self.limit_s is None else max(0.0, self.limit_s - self.elapsed_s())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The wait is under way within; meanwhile :func:`waits_now` has it."""
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
        if self.limit_s is None or self.elapsed_s() <= self.limit_s:
            return
        suffix = f"; {detail}" if detail else ""
        remedy = f"raise {self.setting} or find out what is slow" if self.setting else "find out what is slow"
        raise DeadlineExceeded(
            f"{self.name} took longer than {self.limit_s:g} s (waiting for {self.elapsed_s():.1f} s){suffix}",
            remedy=remedy,
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that is under way, and the thread (as ``threading.get_ident()`` gives it) that waits."""

    deadline: Deadline
    thread: int


# Not guarded by a lock: to set, to delete and to copy are each one operation of the dict.
_under_way: dict[object, Wait] = {}


def waits_now() -> tuple[Wait, ...]:
    """The waits of all threads of this process that are under way, in the order in which they began."""
    return tuple(_under_way.copy().values())
