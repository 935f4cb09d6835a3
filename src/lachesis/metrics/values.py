"""Typed metric values, which are summed where they arise, and reduced once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Mean:
    """Weighted mean: ``total`` is the weighted sum, ``weight`` the sum of weights."""

    total: float
    weight: float = 1.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float | None:
        """Return the mean, or None if nothing was counted: a missing value is not 0."""
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum of counts or durations."""

    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """Largest value seen; minus infinity if there was none."""

    total: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.total, other.total))

    def value(self) -> float | None:
        """Return the largest value, or None if there was none."""
        return None if self.total == -math.inf else self.total


MetricValue: TypeAlias = Mean | Sum | Max
Metrics: TypeAlias = Mapping[str, MetricValue]


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, MetricValue]:
    """Merge by name. Values of one name must be of one kind; a mix is a programming error (TypeError)."""
    merged: dict[str, MetricValue] = {}
    for part in parts:
        for name, value in part.items():
            known = merged.get(name)
            if known is None:
                merged[name] = value
            elif type(known) is type(value):
                merged[name] = known.merge(value)  # type: ignore[arg-type]
            else:
                raise TypeError(f"metric {name!r} is both {type(known).__name__} and {type(value).__name__}")
    return merged


def reduce_metrics(metrics: Metrics) -> dict[str, float]:
    """Return plain numbers; values with nothing counted are left out."""
    return {name: number for name, value in metrics.items() if (number := value.value()) is not None}
