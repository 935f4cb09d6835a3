"""Meters of concurrent work: seconds in which anything is active, and averages over time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Seconds = Callable[[], float]


class BusyTime:
    """Meter of the seconds in which at least one of several spans, which may overlap, was open."""

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


class Tally:
    """Tally of counts by name, to which any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        """Add to the counts of these names."""
        with self._lock:
            self._counts.update(amounts)  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> float:
        return self._counts[name]

    def named(self, prefix: str) -> dict[str, float]:
        """Return the counts whose names begin with ``prefix``, by the rest of the name."""
        with self._lock:
            return {name.removeprefix(prefix): n for name, n in self._counts.items() if name.startswith(prefix)}

    def take(self, *names: str) -> dict[str, float]:
        """Return the counts since the last call: of ``names``, even if 0, and of all other names."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in (*names, *sorted(set(counts) - set(names)))}


class Means:
    """Weighted means by name, to which any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, values: Mapping[str, float], *, weight: float = 1.0) -> None:
        """Add a value to each of these names."""
        with self._lock:
            for name, value in values.items():
                total, weights = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + value * weight, weights + weight)

    def take(self) -> dict[str, float]:
        """Return the means since the last call, as ``reward_metrics/NAME``."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {f"reward_metrics/{name}": total / weights for name, (total, weights) in sums.items()}
