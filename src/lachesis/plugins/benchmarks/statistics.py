"""Mean@k and pass@k with intervals, and tests of the difference between two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, pvariance

import numpy as np
from numpy.typing import NDArray

from lachesis.metrics.names import chance_words
from lachesis.plugins.report.data import accuracy_interval

_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float], *, samples: int = 1) -> Estimate:
    """Return the mean over problems of shares of so many samples, with Wilson's interval.

    The samples of a problem depend on one another, so the interval is that of fewer that do not: of mean·(1 - mean) /
    variance of the mean (Korn and Graubard 1998), at least the problems and at most all samples.
    """
    mean, effective = fmean(values), float(len(values))
    if len(values) > 1 and 0 < mean < 1:
        variance = pvariance(values) / len(values)
        most = effective * samples
        effective = max(effective, min(most, mean * (1 - mean) / variance)) if variance else most
    return Estimate(mean, *accuracy_interval(mean, effective))


def pass_at(k: int, *, samples: int, right: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k)/C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of two models' means on the same problems.

    Attributes:
        gain: of the first over the second.
        low, high: its 95 % interval, by a paired bootstrap.
        p: the chance of a difference this large if the models are equal, two-sided.
        test: the test that gives ``p``.
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
        return (
            f"{100 * self.gain:+.1f} points on {self.problems} problems (95 % interval {100 * self.low:+.1f} to "
            f"{100 * self.high:+.1f}; {self.test}, p = {self.p:.2g}): {chance_words(self.gain, p=self.p)}"
        )


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two models by their means of each problem, in the same order.

    ``p`` is exact by McNemar's test where every problem is right or wrong, else of :func:`by_permutation`.
    """
    differences = np.array(first) - np.array(second)
    count = len(differences)
    drawn = np.random.default_rng(0)
    means = np.array([differences[drawn.integers(count, size=count)].mean() for _ in range(_RESAMPLES)])
    low, high = np.quantile(means, [0.025, 0.975])
    if all(value in (0, 1) for value in (*first, *second)):
        p, test = mcnemar(int((differences > 0).sum()), int((differences < 0).sum())), "exact McNemar test"
    else:
        p, test = by_permutation(differences[differences != 0]), "permutation test"
    return Comparison(float(differences.mean()), float(low), float(high), p, test, count)


def by_permutation(differences: NDArray[np.float64]) -> float:
    """Return how likely a sum so far from 0 is where each difference is as likely with the other sign (Fisher 1935)."""
    count, least = len(differences), abs(differences.sum()) - 1e-9
    if 2**count <= _RESAMPLES:
        signs = np.array(list(product((-1, 1), repeat=count)))
        return float((abs(signs @ differences) >= least).mean())
    drawn = np.random.default_rng(1)
    sums = np.array([differences @ drawn.choice((-1, 1), size=count) for _ in range(_RESAMPLES)])
    return float((abs(sums) >= least).sum() + 1) / (_RESAMPLES + 1)  # the signs as they are count too: never 0


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p of these numbers of problems gained and lost (McNemar 1947): binomial with 1/2."""
    count = gained + lost
    tail = sum(math.comb(count, i) for i in range(min(gained, lost) + 1)) / 2**count
    return min(1.0, 2 * tail)
