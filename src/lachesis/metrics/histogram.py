"""How the rewards of a step are spread: all right, all wrong and half of each have one mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

BINS = 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values are in each of equal ranges from ``low`` to ``high``; the last one has its upper end too."""

    low: float
    high: float
    counts: tuple[int, ...]


def histogram(values: Iterable[float | None], *, bins: int = BINS) -> Histogram | None:
    """Of the values that are known and finite; one range where all are equal, None where there is no value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    if low == high:
        return Histogram(low, high, (len(known),))
    import numpy as np  # commands that only read metrics start without it

    counts, _ = np.histogram(known, bins=bins)
    return Histogram(low, high, tuple(counts.tolist()))
