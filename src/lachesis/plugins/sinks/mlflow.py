"""MLflow."""

from __future__ import annotations

import importlib
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError, DependencyError
from lachesis.common.files import write_atomic
from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.hub import Sink
from lachesis.metrics.names import evaluation_values
from lachesis.metrics.sinks.console import CompletionPicker
from lachesis.plugins.sinks.section import MlflowConfig

# What MLflow takes in one call, and of one value: it refuses more.
_METRICS_A_CALL, _PARAMS_A_CALL, _PARAM_CHARACTERS, _TAG_CHARACTERS = 1000, 100, 6000, 5000


class MlflowSink(Sink):
    """Logs every value as a metric at its step, the configuration as parameters, and findings as tags.

    The id of the MLflow run is kept in RUN/mlflow_run_id, so that a resumed run continues it.

    Args:
        config: the section ``logging.mlflow``.
        run_dir: the run directory.
        run_name: used where the section names no run.
        settings: the resolved configuration of the run.
        resume_step: not ``None`` if a run is resumed.
        completions: which completions are logged, as completions/step_N.json; ``None`` logs none.

    Raises:
        DependencyError: the package mlflow (or mlflow-skinny) is not installed.
        ConfigError: MLflow refused to start.
    """

    def __init__(
        self,
        config: MlflowConfig,
        *,
        run_dir: Path,
        run_name: str,
        settings: Mapping[str, Any],
        resume_step: int | None = None,
        completions: CompletionPicker | None = None,
    ) -> None:
        self._completions = completions
        try:
            self._entities = importlib.import_module("mlflow.entities")
            client = importlib.import_module("mlflow").MlflowClient
        except ImportError as error:
            raise DependencyError(
                f"logging.mlflow is set but mlflow cannot be imported: {error}",
                remedy='pip install "lachesis[mlflow]", or remove logging.mlflow',
            ) from error
        kept = Path(run_dir) / "mlflow_run_id"
        try:
            self._client = client(tracking_uri=config.tracking_uri)
            if resume_step is not None and kept.exists():
                self._id = kept.read_text(encoding="utf-8").strip()
                self._client.update_run(self._id, status="RUNNING")
            else:
                self._id = self._begin(config, run_name=run_name, settings=settings)
        except Exception as error:
            raise ConfigError(
                f"MLflow did not start: {type(error).__name__}: {error}",
                remedy="check logging.mlflow.tracking_uri, or MLFLOW_TRACKING_URI, and that its server runs; a "
                "database without a server, MLflow's default, needs the package mlflow in place of mlflow-skinny",
            ) from error
        write_atomic(kept, self._id + "\n")

    def _begin(self, config: MlflowConfig, *, run_name: str, settings: Mapping[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name(config.experiment)
        number = self._client.create_experiment(config.experiment) if experiment is None else experiment.experiment_id
        run_id = str(self._client.create_run(number, run_name=config.name or run_name).info.run_id)
        params = [self._entities.Param(name, text[:_PARAM_CHARACTERS]) for name, text in _flat(settings)]
        for chunk in _chunks(params, _PARAMS_A_CALL):
            self._client.log_batch(run_id, params=chunk)
        return run_id

    def write(self, record: StepRecord) -> None:
        values = dict(record.values)
        if record.evaluation is not None:
            values |= evaluation_values(record.evaluation)
        self._log(values, step=record.step)
        for finding in record.findings:
            message = f"step {record.step}: {finding.line}"
            self._client.set_tag(self._id, f"health.{finding.rule}", message[:_TAG_CHARACTERS])
        if self._completions is not None and (table := self._completions.table(record)) is not None:
            columns, rows = table
            content = {"columns": columns, "data": rows}
            self._client.log_dict(self._id, content, f"completions/step_{record.step}.json")

    def evaluation(self, result: EvalResult) -> None:
        self._log(evaluation_values(result), step=result.step)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _log(self, values: Mapping[str, float], *, step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(metric_name(name), value, now, step) for name, value in values.items()]
        for chunk in _chunks(metrics, _METRICS_A_CALL):
            self._client.log_batch(self._id, metrics=chunk)


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits, ``_ - . /`` and spaces, without relative paths."""
    return posixpath.normpath(re.sub(r"[^\w.\- /]", "_", name, flags=re.ASCII)).lstrip("/.") or "_"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``section.key`` and its value as text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
