"""Histogram of a step's rewards, because all right, all wrong and half of each can have one mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

BINS = 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in equal ranges from ``low`` to ``high``; the last range includes its upper end."""

    low: float
    high: float
    counts: tuple[int, ...]


def histogram(values: Iterable[float | None], *, bins: int = BINS) -> Histogram | None:
    """Return the histogram of the known, finite values: one range if all are equal, None if there is no value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    if low == high:
        return Histogram(low, high, (len(known),))
    import numpy as np  # commands that only read metrics start without it

    counts, _ = np.histogram(known, bins=bins)
    return Histogram(low, high, tuple(counts.tolist()))
