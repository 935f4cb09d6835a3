"""Statistics that tell differences between groups from chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, variance

from lachesis.metrics.health.types import GroupDigest


def z_score(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the rise of the mean in standard errors (Welch's t); 0 unless both have two values.

    Values of one group count as one: completions of a prompt depend on each other.
    """
    if len(before) < 2 or len(after) < 2:
        return 0.0
    rise = fmean(after) - fmean(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return rise / error if error > 0 else math.copysign(math.inf, rise) if rise else 0.0


def rate_fell(before: float, after: float, *, count_before: int, count_after: int) -> float:
    """Return the fall of a share in standard errors of two binomial counts."""
    error = math.sqrt(before * (1 - before) / count_before + after * (1 - after) / count_after)
    return (before - after) / error if error > 0 else math.copysign(math.inf, before - after)


def correlation_within(groups: Iterable[GroupDigest]) -> float:
    """Return Pearson's correlation of reward and length, both less their mean in the group; 0 without spread."""
    pairs = [
        (reward - fmean(group.rewards), length - fmean(group.lengths))
        for group in groups
        if group.rewards
        for reward, length in zip(group.rewards, group.lengths, strict=True)
    ]
    spread = math.sqrt(sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs))
    return sum(x * y for x, y in pairs) / spread if spread > 0 else 0.0
