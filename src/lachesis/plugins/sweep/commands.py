"""The command ``sweep``."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from lachesis.cli.base import app, console, shown
from lachesis.common.errors import ConfigError
from lachesis.config.document import read_document
from lachesis.config.load import load_config
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.plugins.report.compare import write_compare


class Range(BaseModel):
    """Range to draw from: uniform, or uniform in the logarithm."""

    model_config = ConfigDict(extra="forbid")
    low: float
    high: float
    log: bool = False

    def draw(self, chance: random.Random) -> float:
        """Return a number of the range."""
        if not self.log:
            return chance.uniform(self.low, self.high)
        return math.exp(chance.uniform(math.log(self.low), math.log(self.high)))


class Sweep(BaseModel):
    """Contents of a sweep's file.

    Attributes:
        config: configuration of the runs, next to the file.
        keys: values of each dotted key, or a range to draw from; each run has one value of each.
        runs: number of runs with random values; all combinations if unset.
        seed: seed of the random values.
    """

    model_config = ConfigDict(extra="forbid")
    config: str
    keys: dict[str, list[Any] | Range] = Field(min_length=1)
    runs: PositiveInt | None = None
    seed: int = 0

    def settings(self) -> Iterator[dict[str, Any]]:
        """Yield the keys of each run. Raises ConfigError if a range has no number of runs."""
        if self.runs is not None:
            chance = random.Random(self.seed)
            for _ in range(self.runs):
                yield {
                    key: values.draw(chance) if isinstance(values, Range) else chance.choice(values)
                    for key, values in self.keys.items()
                }
            return
        lists = {key: values for key, values in self.keys.items() if isinstance(values, list)}
        if len(lists) < len(self.keys):
            raise ConfigError("a range has no grid of values", remedy="set runs, the number of random values")
        yield from (dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values()))


def read_sweep(path: Path) -> Sweep:
    """Return the content of a sweep's file. Raises ConfigError."""
    try:
        return Sweep.model_validate(read_document(path).data)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3]]
        raise ConfigError(
            f"{path} is not a sweep: {'; '.join(faults)}",
            remedy="write `config: CONFIG.yaml` and `keys: {KEY: [VALUE, ...]}` (docs/watching.md)",
        ) from error


def run_command(config: Path, name: str, keys: Mapping[str, Any]) -> list[str]:
    """Return the command of one run."""
    sets = [f"{key}={json.dumps(value)}" for key, value in {**keys, "run.name": name}.items()]
    return [sys.executable, "-m", "lachesis", "train", str(config), *(word for one in sets for word in ("--set", one))]


@app.command("sweep")
def sweep(
    file: Annotated[Path, typer.Argument(help="YAML file: config, keys, runs, seed.")],
    out: Annotated[Path, typer.Option(help="Page that compares the runs.")] = Path("sweep.html"),
) -> None:
    """Train once for each combination of keys (or for random ones), in turn, and compare the runs on one page."""
    asked = read_sweep(file)
    config = file.parent / asked.config
    settings = list(asked.settings())
    base = load_config(config).config.run
    names = [f"{base.name}-{number:02d}" for number in range(1, len(settings) + 1)]
    commands = [run_command(config, name, keys) for name, keys in zip(names, settings, strict=True)]
    for keys, name in zip(settings, names, strict=True):
        load_config(config, overrides=[f"{key}={json.dumps(value)}" for key, value in keys.items()])
        console.print(f"{name}: {', '.join(f'{key} {value}' for key, value in keys.items())}")
    done: dict[str, float] = {}
    for name, command in zip(names, commands, strict=True):
        path = base.directory.parent / name / "metrics.jsonl"
        if subprocess.run(command, check=False).returncode == 0 and path.exists():
            rewards = [step.values["reward"] for step in read_metrics(path).steps[-10:] if "reward" in step.values]
            done[name] = sum(rewards) / max(len(rewards), 1)
    for name, reward in sorted(done.items(), key=lambda one: -one[1]):
        console.print(f"{name}: reward {reward:.4g} over its last steps")
    if len(done) > 1:
        console.print(f"comparison: {shown(write_compare([base.directory.parent / name for name in done], out))}")
    if len(done) < len(names):
        raise ConfigError(f"{len(names) - len(done)} of {len(names)} runs failed", remedy="see their logs/trainer.log")
