"""Training loop. It works with any bridge, source, engine and strategy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lachesis.bridges.base import Bridge
from lachesis.common.errors import StopRequested
from lachesis.common.types import EvalResult
from lachesis.metrics.hub import HubTelemetry
from lachesis.metrics.names import RECEIVING_OF, SENDING_OF, SENT_BY
from lachesis.metrics.values import Mean, MetricValue
from lachesis.pipeline.feed import Feed
from lachesis.train.batch import Batch
from lachesis.train.best import BestModel
from lachesis.train.policy import Policy
from lachesis.train.resume import RunCheckpoints

logger = logging.getLogger("lachesis")


class Evaluation(Protocol):
    """Evaluation on held-out problems, when due."""

    def due(self, step: int) -> bool: ...

    def maybe_run(self, step: int) -> EvalResult | None: ...


class PausePoint(Protocol):
    """Check that returns at once, or, while a pause is requested, calls ``meanwhile`` until the run may continue."""

    def __call__(self, step: int, meanwhile: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Trainer:
    """Trainer made of the parts of a run; :meth:`train` is the algorithm."""

    policy: Policy
    feed: Feed[Batch]
    bridge: Bridge[Policy]
    evaluation: Evaluation
    checkpoints: RunCheckpoints
    telemetry: HubTelemetry
    stop_requested: Callable[[], bool]
    pause: PausePoint
    best: BestModel | None = None

    def train(self, *, start: int, steps: int) -> int:
        """Train from step ``start`` (the number already done) to ``steps``; return the last step done."""
        self.bridge.sync(start)
        if start == 0:
            before = self._evaluate(start)
            self.telemetry.evaluation(before)
            self._ends_after(before)
        clock = Clock()
        recorded = self.telemetry.flush  # first, so that a run resumed from a checkpoint has a line for every step
        for step in range(start + 1, steps + 1):
            try:
                with clock.left_out():
                    self.pause(step - 1, partial(self.checkpoints.save_if_asked, step - 1, recorded=recorded))
                with clock.measure("data_fetch_time"):
                    batch = self.bridge.retry(self.feed.next)  # back-pressure and deadlines live behind this
            except StopRequested:
                self.checkpoints.maybe_save(step - 1, stopping=True, recorded=recorded)
                return step - 1
            self.bridge.rest()
            with clock.measure("train_time"):
                metrics = self.policy.accumulate(batch)
            with clock.measure("sync_time"), self.bridge.update_to(step, due=self.evaluation.due(step)):
                metrics |= self.policy.step()
            self.feed.advance(step)
            with clock.measure("eval_time"):
                evaluation = self._evaluate(step)
            self.telemetry.emit(
                step=step,
                metrics={
                    **metrics,
                    **self.bridge.engine.metrics(),
                    **self._sync_metrics(),
                    **self.checkpoints.take_metrics(),
                    **clock.take(),
                },
                counters=self.feed.counters(),
                groups=batch.groups,
                evaluation=evaluation,
            )
            stopping = (self._ends_after(evaluation) or self.stop_requested()) and step < steps
            # Its seconds count with the next step.
            with clock.measure("checkpoint_time"):
                self.checkpoints.maybe_save(step, stopping=stopping, recorded=recorded)
            if stopping:
                return step
        return max(start, steps)

    def _evaluate(self, step: int) -> EvalResult | None:
        try:
            return self.bridge.retry(lambda: self.evaluation.maybe_run(step))
        except StopRequested as stop:  # the step is done, and the run stops after it
            logger.warning("step %d is not evaluated: %s", step, stop)
            return None

    def _ends_after(self, evaluation: EvalResult | None) -> bool:
        """Return True if the run should end because its evaluations do not improve."""
        return self.best is not None and evaluation is not None and self.best.take(evaluation)

    def _sync_metrics(self) -> dict[str, MetricValue]:
        report = self.bridge.last_report
        if report is None:
            return {}
        metrics: dict[str, MetricValue] = {
            "weight_version": Mean(float(report.version)),
            "transfer_time": Mean(report.seconds),
            "proof_time": Mean(report.proof_seconds),
        }
        if report.sleep_seconds is not None and report.wake_seconds is not None:
            metrics |= {"sleep_time": Mean(report.sleep_seconds), "wake_time": Mean(report.wake_seconds)}
        if report.canary_error is not None and report.canary_ratio is not None:
            metrics |= {"canary_error": Mean(report.canary_error), "canary_ratio": Mean(report.canary_ratio)}
        metrics |= {f"{RECEIVING_OF}{engine}": Mean(seconds) for engine, seconds in report.engines.items()}
        for rank, sent in report.ranks.items():
            metrics[f"{SENDING_OF}{rank}"] = Mean(sent.seconds)
            metrics[f"{SENT_BY}{rank}"] = Mean(sent.num_bytes / 1e9)
        return metrics


class Clock:
    """Clock of seconds by name, since they were last taken."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds spent in the block to ``name``."""
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the seconds spent in the block out of the step's."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def take(self) -> dict[str, MetricValue]:
        """Return all measured seconds and those of the whole step, and reset them."""
        now = time.perf_counter()
        self._seconds["step_time"] = now - self._started
        taken: dict[str, MetricValue] = {name: Mean(seconds) for name, seconds in self._seconds.items()}
        self._started, self._seconds = now, {}
        return taken
