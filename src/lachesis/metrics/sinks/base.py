"""The contract of a sink: somewhere that step records go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

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


def run_paths(run_dir: Path) -> dict[str, Path]:
    """The files of a run directory by name; nothing is created."""
    return {
        "config": run_dir / "config.yaml",
        "metrics": run_dir / "metrics.jsonl",
        "rollouts": run_dir / "rollouts",
        "report": run_dir / "report.html",
        "state": run_dir / "state.json",
        "live": run_dir / "live.json",
        "checkpoints": run_dir / "checkpoints",
        "final": run_dir / "final",
        "logs": run_dir / "logs",
        "tensorboard": run_dir / "tensorboard",
    }
