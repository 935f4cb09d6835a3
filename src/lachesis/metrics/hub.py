"""What a sink is; every record is handed to every sink, and the failures of sinks are kept away from training."""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from lachesis.common.types import EvalResult, Finding, StepRecord
from lachesis.metrics.health.monitor import HealthMonitor

logger = logging.getLogger("lachesis")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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


class MetricsHub:
    """Holds the sinks and, if given, the health monitor whose findings it adds to each record.

    A sink (or the monitor) that raises is reported once, as a warning of one sentence on the logger
    ``lachesis``, and dropped; nothing of it reaches the caller.

    Args:
        sinks: written to in this order; a report sink comes after those whose files it reads.
        monitor: looks at every record before the sinks get it.
    """

    def __init__(self, sinks: Sequence[Sink], *, monitor: HealthMonitor | None = None) -> None:
        self._sinks = list(sinks)
        self._monitor = monitor

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still work."""
        return tuple(self._sinks)

    def emit(self, record: StepRecord) -> StepRecord:
        """Give a finished step to every sink; returns the record as they got it, findings included."""
        record = replace(record, findings=(*record.findings, *self._examine(record)))
        self._each(lambda sink: sink.write(record), f"step {record.step}")
        return record

    def evaluation(self, result: EvalResult) -> None:
        """Give an evaluation that belongs to no step (before the first) to every sink."""
        if self._monitor is not None:
            self._monitor.evaluation(result)
        self._each(lambda sink: sink.evaluation(result), f"the evaluation at step {result.step}")

    def close(self) -> None:
        """Close every sink. Idempotent."""
        self._each(lambda sink: sink.close(), "the end of the run")
        self._sinks.clear()

    def _examine(self, record: StepRecord) -> Sequence[Finding]:
        if self._monitor is None:
            return ()
        try:
            return self._monitor.examine(record)
        except Exception as error:
            self._monitor = None
            logger.warning("%s", _sentence("the health rules", f"step {record.step}", error))
            return ()

    def _each(self, action: Callable[[Sink], None], occasion: str) -> None:
        for sink in tuple(self._sinks):
            try:
                action(sink)
            except Exception as error:
                self._sinks.remove(sink)
                logger.warning("%s", _sentence(type(sink).__name__, occasion, error))
                with suppress(Exception):  # it failed and has been reported; what it holds is given back
                    sink.close()


def _sentence(who: str, occasion: str, error: Exception) -> str:
    """What failed, why, and what it means, in one line."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        where = f" while writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{where}: {who} failed at {occasion} and is off for the rest of this run; "
            "training goes on, but free some space before the next checkpoint"
        )
    reason = " ".join(str(error).split()) or "no message"
    return (
        f"{who} failed at {occasion} and is off for the rest of this run, while training goes on: "
        f"{type(error).__name__}: {reason}"
    )
