"""Weights & Biases."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lachesis.common.errors import ConfigError
from lachesis.common.files import write_atomic
from lachesis.common.imports import optional_package
from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.hub import Sink
from lachesis.metrics.sinks.console import CompletionPicker
from lachesis.plugins.sinks.evaluation import evaluation_values, values_of
from lachesis.plugins.sinks.section import WandbConfig

logger = logging.getLogger("lachesis")

_INSTALL = 'pip install "lachesis[wandb]"'


class WandbSink(Sink):
    """Sink that logs every value of a step, drawn over our own step number.

    The id of the W&B run is kept in RUN/wandb/lachesis_run_id, so that a resumed run continues it.

    Args:
        config: the section ``logging.wandb``.
        run_dir: the run directory; W&B keeps its files under RUN/wandb.
        run_name: used if the section names no run.
        settings: the resolved configuration of the run, shown by W&B.
        resume_step: not ``None`` if a run is resumed.
        completions: which completions are logged, as the table ``completions``; ``None`` logs none.

    Raises:
        DependencyError: the package wandb is not installed (see :meth:`WandbConfig.is_wanted`).
        ConfigError: W&B refused to start, for example without a login.
    """

    def __init__(
        self,
        config: WandbConfig,
        *,
        run_dir: Path,
        run_name: str,
        settings: Mapping[str, Any],
        resume_step: int | None = None,
        completions: CompletionPicker | None = None,
    ) -> None:
        self._completions = completions
        why, remedy = "logging.wandb is set but wandb cannot be imported", f"{_INSTALL}, or remove logging.wandb"
        self._wandb = wandb = optional_package("wandb", why, remedy=remedy)
        run_id = _run_id(Path(run_dir), resumed=resume_step is not None)
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                name=config.name or run_name,
                mode=_mode(wandb, config, run_dir=run_dir),
                dir=str(run_dir),
                config=dict(settings),
                id=run_id,
                resume="allow",
            )
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases did not start: {type(error).__name__}: {error}",
                remedy="run `wandb login`, or set logging.wandb.mode to offline",
            ) from error
        # Without our own step W&B refuses the steps between the resumed one and the last one logged.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: StepRecord) -> None:
        values = values_of(record, completions=self._completions, table=self._wandb.Table)
        health = {f"health/{finding.rule}": finding.line for finding in record.findings}
        self._run.log({"step": record.step, **values, **health})

    def evaluation(self, result: EvalResult) -> None:
        self._run.log({"step": result.step, **evaluation_values(result)})

    def close(self) -> None:
        self._run.finish()


def _mode(wandb: Any, config: WandbConfig, *, run_dir: Path) -> Literal["online", "offline", "disabled"] | None:
    """Return the mode for wandb.init; None leaves it to WANDB_MODE."""
    if config.mode != "auto":
        return config.mode
    if os.environ.get("WANDB_MODE"):
        return None
    # This asks neither the terminal nor the server.
    if wandb.login(prompt=False, verify=False):
        return "online"
    logger.warning(
        "there is no login at Weights & Biases: the run is logged offline; "
        "`wandb login` and `wandb sync %s/wandb/offline-run-*` send it there",
        run_dir,
    )
    return "offline"


def _run_id(run_dir: Path, *, resumed: bool) -> str:
    """Return W&B's id for this run: the stored one if the run is resumed, else a new one."""
    path = run_dir / "wandb" / "lachesis_run_id"
    if resumed and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:12]
    write_atomic(path, run_id + "\n")
    return run_id
