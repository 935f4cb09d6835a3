"""The contract of a sink: somewhere that step records go."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lachesis.common.types import EvalResult, StepRecord


class Sink(ABC):
    """Receives every step record in order. A sink that raises is reported once and dropped, never fatal."""

    @abstractmethod
    def write(self, record: StepRecord) -> None:
        """Take one finished step."""

    def evaluation(self, result: EvalResult) -> None:
        """Take an evaluation that belongs to no step (before the first)."""
        return None

    def close(self) -> None:
        """Flush and finish."""
        return None
