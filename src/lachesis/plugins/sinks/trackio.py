"""Trackio."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.imports import optional_package
from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.hub import Sink
from lachesis.metrics.sinks.console import CompletionPicker
from lachesis.plugins.sinks.evaluation import evaluation_values, values_of
from lachesis.plugins.sinks.section import TrackioConfig


class TrackioSink(Sink):
    """Sink that logs every value under its own name at its step; findings are alerts.

    Args:
        config: the section ``logging.trackio``.
        run_name: used if the section names no run. A resumed run continues the one of that name.
        settings: the resolved configuration of the run.
        resume_step: not ``None`` if a run is resumed.
        completions: which completions are logged, as the table ``completions``; ``None`` logs none.

    Raises:
        DependencyError: the package trackio is not installed.
        ConfigError: Trackio refused to start.
    """

    def __init__(
        self,
        config: TrackioConfig,
        *,
        run_name: str,
        settings: Mapping[str, Any],
        resume_step: int | None = None,
        completions: CompletionPicker | None = None,
    ) -> None:
        self._completions = completions
        self._trackio = optional_package(
            "trackio",
            "logging.trackio is set but trackio cannot be imported",
            remedy='pip install "lachesis[trackio]", or remove logging.trackio',
        )
        try:
            with redirect_stdout(io.StringIO()):  # Trackio prints how to open its dashboard
                self._run = self._trackio.init(
                    project=config.project,
                    name=config.name or run_name,
                    space_id=config.space,
                    config=dict(settings),
                    resume="never" if resume_step is None else "allow",
                )
        except Exception as error:
            raise ConfigError(
                f"Trackio did not start: {type(error).__name__}: {error}",
                remedy="check logging.trackio, and your login if logging.trackio.space is set",
            ) from error

    def write(self, record: StepRecord) -> None:
        values = values_of(record, completions=self._completions, table=self._trackio.Table)
        self._run.log(values, step=record.step)
        levels = self._trackio.AlertLevel
        for finding in record.findings:
            level = {"note": levels.INFO, "warning": levels.WARN, "problem": levels.ERROR}[finding.level]
            with redirect_stdout(io.StringIO()):  # which has the run's findings already
                self._run.alert(finding.rule, text=finding.message, level=level, step=record.step)

    def evaluation(self, result: EvalResult) -> None:
        self._run.log(evaluation_values(result), step=result.step)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()
