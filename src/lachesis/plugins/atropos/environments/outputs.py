"""Outputs of an environment: counters and metrics as JSON lines and to Weights & Biases, groups, and evaluations."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.imports import optional_package
from lachesis.common.types import EvalResult
from lachesis.plugins.atropos.environments.records import UsableGroup


class JsonLines:
    """File to which whole lines of JSON are appended.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: Path, *, option: str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{option}: {path} cannot be written: {error.strerror or error}", remedy="choose another path"
            ) from error

    def write(self, document: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(document, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Outputs:
    """Outputs of an environment, apart from its posts. Outputs that are not requested cost nothing.

    Args:
        log_dir: metrics.jsonl goes here.
        groups_path: every group goes here.
        evals_dir: evaluations.jsonl goes here.
    """

    def __init__(
        self, *, log_dir: Path | None = None, groups_path: Path | None = None, evals_dir: Path | None = None
    ) -> None:
        self._metrics = JsonLines(log_dir / "metrics.jsonl", option="--env.log_dir") if log_dir else None
        self._groups = JsonLines(groups_path, option="--env.data_path_to_save_groups") if groups_path else None
        evals = evals_dir / "evaluations.jsonl" if evals_dir else None
        self._evaluations = JsonLines(evals, option="--env.data_dir_to_save_evals") if evals else None
        self._wandb: Any = None
        self._prefix = ""

    def start_wandb(self, *, project: str | None, group: str | None, name: str, settings: Mapping[str, Any]) -> None:
        """Log to Weights & Biases as well, with the prefix ``NAME_``, so that environments of one run differ.

        Raises:
            DependencyError: the package wandb is not installed.
            ConfigError: it refused to start.
        """
        wandb = optional_package(
            "wandb",
            "--env.use_wandb is set but wandb cannot be imported",
            remedy='pip install "lachesis[wandb]", or leave --env.use_wandb out',
        )
        try:
            self._wandb = wandb.init(project=project, group=group, name=name, config=dict(settings))
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases did not start: {type(error).__name__}: {error}",
                remedy="run `wandb login`, or set WANDB_MODE=offline",
            ) from error
        self._prefix = f"{name}_"
        # An evaluation belongs to the step at which it began, but W&B refuses values of earlier steps.
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        if self._metrics is not None:
            self._metrics.write({"type": "step", "step": step, "time": time.time(), "values": dict(values)})
        self._log(step, values)

    def evaluation(self, name: str, result: EvalResult) -> None:
        """Write an evaluation."""
        document = {"environment": name, "time": time.time(), **asdict(result)}
        for file in (self._evaluations, self._metrics):
            if file is not None:
                file.write({"type": "evaluation", **document})
        self._log(result.step, {"eval/accuracy": result.accuracy, "eval/mean_reward": result.mean_reward})

    def group(self, group: UsableGroup) -> None:
        """Write a group."""
        if self._groups is not None:
            self._groups.write(group.document())

    def close(self) -> None:
        """Close the files, and finish at Weights & Biases."""
        for file in (self._metrics, self._groups, self._evaluations):
            if file is not None:
                file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if self._wandb is not None:
            self._wandb.log({"step": step, **{f"{self._prefix}{name}": value for name, value in values.items()}})


@dataclass(slots=True)
class Counters:
    """Counters. ``dropped`` counts unsent groups by reason, ``set_aside`` those that the API rejected."""

    groups: int = 0
    sequences: int = 0
    score_sum: float = 0.0
    trained_tokens: int = 0
    group_seconds: float = 0.0
    failures: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    set_aside: Counter[str] = field(default_factory=Counter)

    def count_sent(self, group: UsableGroup) -> None:
        """Count a group that the API accepted."""
        self.groups += 1
        self.sequences += group.size
        self.score_sum += sum(group.scores)
        self.trained_tokens += group.trained

    def add(self, other: Counters) -> None:
        """Add another object's counts."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def values(self) -> dict[str, float]:
        """Return the counters as metrics, with means if there is something to average."""
        values: dict[str, float] = {
            "groups": self.groups,
            "sequences": self.sequences,
            "trained_tokens": self.trained_tokens,
            "failures": self.failures,
            "dropped": self.dropped.total(),
            "set_aside": self.set_aside.total(),
        }
        if self.sequences:
            values["score/mean"] = self.score_sum / self.sequences
            values["completion_length/mean"] = self.trained_tokens / self.sequences
        if self.groups:
            values["group_seconds/mean"] = self.group_seconds / self.groups
        return values
