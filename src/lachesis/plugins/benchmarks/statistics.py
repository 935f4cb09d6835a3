"""Mean@k and pass@k with intervals, and whether one model is better than another by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from lachesis.plugins.report.data import accuracy_interval

Z = 1.959964
"""Quantile of the normal distribution for 95 %."""
CHANCE = 0.05
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean over problems of values from 0 to 1, with Wilson's interval where all are 0 or 1.

    Otherwise the interval is normal, with the deviation between problems, whose samples depend on one another
    (Miller, "Adding Error Bars to Evals", 2024, arXiv 2411.00640).
    """
    mean = fmean(values)
    if all(value in (0, 1) for value in values):
        return Estimate(mean, *accuracy_interval(mean, len(values)))
    half = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 1.0
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half))


def pass_at(k: int, *, samples: int, right: int) -> float:
    """Return the unbiased chance that one of k is right, 1 - C(n - c, k)/C(n, k) (Chen et al. 2021, 2107.03374)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of two models' means on the same problems.

    Attributes:
        gain: of the first over the second.
        low, high: its 95 % interval, by a paired bootstrap.
        p: how likely a difference so large is by chance, two-sided.
        test: where ``p`` comes from.
        problems: in common.
    """

    gain: float
    low: float
    high: float
    p: float
    test: str
    problems: int

    def sentence(self) -> str:
        """Return the comparison in words."""
        if self.p >= CHANCE:
            verdict = "not more than chance"
        else:
            verdict = f"a {'gain' if self.gain > 0 else 'loss'} beyond chance"
        return (
            f"{100 * self.gain:+.1f} points on {self.problems} problems (95 % interval {100 * self.low:+.1f} to "
            f"{100 * self.high:+.1f}; {self.test}, p = {self.p:.2g}): {verdict}"
        )


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two models by their means of each problem, in one order.

    ``p`` is exact by McNemar's test where every problem is right or wrong, else of a paired bootstrap.
    """
    differences = np.array(first) - np.array(second)
    count = len(differences)
    drawn = np.random.default_rng(0)
    means = np.array([differences[drawn.integers(count, size=count)].mean() for _ in range(_RESAMPLES)])
    low, high = np.quantile(means, [0.025, 0.975])
    if all(value in (0, 1) for value in (*first, *second)):
        p, test = mcnemar(int((differences > 0).sum()), int((differences < 0).sum())), "exact McNemar test"
    else:
        # One more of each, as the sample itself is one: never 0.
        tail = (min((means <= 0).sum(), (means >= 0).sum()) + 1) / (_RESAMPLES + 1)
        p, test = min(1.0, 2 * float(tail)), "paired bootstrap"
    return Comparison(float(differences.mean()), float(low), float(high), p, test, count)


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p of so many problems gained and lost (McNemar 1947): binomial with a half."""
    count = gained + lost
    tail = sum(math.comb(count, i) for i in range(min(gained, lost) + 1)) / 2**count
    return min(1.0, 2 * tail)
