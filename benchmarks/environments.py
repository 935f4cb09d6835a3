"""What a small model learns from an environment of verifiers, and what its rollouts take, on CPU cores.

    python benchmarks/environments.py [--steps 30] [--set KEY=VALUE ...]

Trains the quickstart's model (made by ``make quickstart``) on examples/verifiers/sums.yaml, and prints a table row.
``--read RUN`` prints that of a run which is there already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from lachesis.metrics.sinks.jsonl import MetricsLog, read_metrics

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "verifiers" / "sums.yaml"
# The first and the last so many steps are compared.
ENDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], help="as of lachesis train")
    parser.add_argument("--read", type=Path, help="the directory of a run")
    options = parser.parse_args()
    run = options.read or train(options.steps, options.set)
    head = "| environment | steps | rollouts a step | reward, first and last 5 steps | held out | s a step | failed |"
    sys.stdout.write(f"{head}\n|---|---|---|---|---|---|---|\n{row(read_metrics(run / 'metrics.jsonl'))}\n")


def train(steps: int, overrides: list[str]) -> Path:
    """A run of the example. Raises CalledProcessError where it fails."""
    directory = Path(tempfile.mkdtemp(prefix="lachesis-environments-"))
    sets = [f"run.steps={steps}", f"run.dir={directory}", *overrides]
    command = [sys.executable, "-m", "lachesis", "train", str(EXAMPLE)]
    command += [part for one in sets for part in ("--set", one)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"COLUMNS": "160"})
    return directory / "verifiers-sums"


def row(metrics: MetricsLog) -> str:
    """A line of the table: means of the ends, of all steps for the others."""
    steps = [record.values for record in metrics.steps]
    rewards = [values["reward"] for values in steps]
    before, after = (metrics.evaluations[place].accuracy for place in (0, -1))
    seconds = sorted(values["step_time"] for values in steps)[len(steps) // 2]
    rollouts = steps[0]["tokens_trained"] / steps[0]["completion_length/mean"]
    cells = (
        f"sums of two digits, verifiers {version('verifiers')}",
        len(steps),
        round(rollouts),
        f"{mean(rewards[:ENDS]):.3f} to {mean(rewards[-ENDS:]):.3f}",
        f"{before:.2f} to {after:.2f}",
        f"{seconds:.1f}",
        f"{sum(values['rollout_failures'] for values in steps):g}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
