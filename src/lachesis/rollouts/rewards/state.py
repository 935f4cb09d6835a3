"""What reward functions are told about training, and what they may log."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where training stands: optimizer steps done, and steps in all (0 where nobody said)."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True)
class Logged:
    """What one call logged: a value per completion for each column, and numbers for each metric."""

    extras: Mapping[str, list[Any]] = field(default_factory=dict)
    metrics: Mapping[str, list[float]] = field(default_factory=dict)


class CallLog:
    """Takes what one call of a reward function logs."""

    NAMES = ("log_extra", "log_metric")

    def __init__(self, count: int) -> None:
        """``count``: completions of the call."""
        self._count = count
        self._extras: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def arguments(self, wanted: Collection[str]) -> dict[str, Callable[..., None]]:
        """Those of ``log_extra`` and ``log_metric`` that a function wants."""
        return {name: getattr(self, name) for name in self.NAMES if name in wanted}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Keep a value per completion beside it. Raises ValueError where there are more or fewer."""
        listed = list(values)
        if len(listed) != self._count:
            raise ValueError(f"log_extra({column!r}) got {len(listed)} values for {self._count} completions")
        self._extras[column] = listed

    def log_metric(self, name: str, value: float) -> None:
        """Add to a metric, of which the mean is shown. Raises ValueError for what is no finite number."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}) got {number}")
        self._metrics.setdefault(name, []).append(number)

    def logged(self) -> Logged:
        """All of it."""
        return Logged(self._extras, self._metrics)
