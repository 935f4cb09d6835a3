"""The layout of a run directory."""

from __future__ import annotations

from pathlib import Path


def run_paths(run_dir: Path) -> dict[str, Path]:
    """Return the paths in a run directory by name; create nothing."""
    return {
        "config": run_dir / "config.yaml",
        "metrics": run_dir / "metrics.jsonl",
        "rollouts": run_dir / "rollouts",
        "failures": run_dir / "failures.jsonl",
        "evaluations": run_dir / "evaluations",
        "report": run_dir / "report.html",
        "state": run_dir / "state.json",
        "live": run_dir / "live.json",
        "requests": run_dir / "requests",
        "checkpoints": run_dir / "checkpoints",
        "final": run_dir / "final",
        "best": run_dir / "best",
        "logs": run_dir / "logs",
        "tensorboard": run_dir / "tensorboard",
    }
