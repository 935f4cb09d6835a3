"""Meters of concurrent work: seconds in which anything is active, and averages over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Seconds = Callable[[], float]


class BusyTime:
    """Seconds in which at least one of several spans, which may overlap, was open."""

    def __init__(self, clock: Seconds = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open = 0
        self._since = self._total = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Count the block as an open span."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def take(self) -> float:
        """Return the seconds since the last call."""
        self._change(0)
        with self._lock:
            total, self._total = self._total, 0.0
        return total

    def _change(self, spans: int) -> None:
        with self._lock:
            now = self._clock()
            if self._open:
                self._total += now - self._since
            self._since = now
            self._open += spans


class TimeAverage:
    """Average over time of a number that changes now and then. One thread at a time."""

    def __init__(self, clock: Seconds = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._value = self._area = self._seconds = 0.0

    def change(self, value: float) -> None:
        """Set the number from now on."""
        now = self._clock()
        elapsed, self._since = now - self._since, now
        self._area += elapsed * self._value
        self._seconds += elapsed
        self._value = value

    def take(self) -> float:
        """Return the average since the last call; the number itself if no time has passed."""
        self.change(self._value)
        average = self._area / self._seconds if self._seconds else self._value
        self._area = self._seconds = 0.0
        return average
