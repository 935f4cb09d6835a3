"""Which runs a sweep starts, and what it says in the end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lachesis.cli.base import app
from lachesis.common.errors import ConfigError
from lachesis.plugins.sweep import commands
from lachesis.plugins.sweep.commands import Sweep, read_sweep

KEYS = {"optimizer.learning_rate": [1e-6, 1e-5], "sampling.num_generations": [4, 8]}


def test_a_grid_has_all_combinations():
    found = list(Sweep(config="c.yaml", keys=KEYS).settings())
    assert [tuple(keys.values()) for keys in found] == [(1e-6, 4), (1e-6, 8), (1e-5, 4), (1e-5, 8)]


def test_random_values_are_in_their_ranges_and_the_same_for_a_seed():
    keys = {"a.b": {"low": 1e-6, "high": 1e-2, "log": True}, "a.c": ["x", "y"], "a.d": {"low": 0, "high": 1}}
    sweep = Sweep.model_validate({"config": "c.yaml", "keys": keys, "runs": 50, "seed": 3})
    found = list(sweep.settings())
    assert found == list(sweep.settings()) and len(found) == 50
    assert all(1e-6 <= one["a.b"] <= 1e-2 and 0 <= one["a.d"] <= 1 and one["a.c"] in "xy" for one in found)
    assert 15 < sum(one["a.b"] < 1e-4 for one in found) < 35, "even in the logarithm"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"config": "c.yaml", "keys": {}}, "keys"),
        ({"config": "c.yaml", "keys": KEYS, "method": "bayes"}, "method"),
        ({"keys": KEYS}, "config"),
        ({"run": {"steps": 3}, "model": {"path": "m"}}, "is not a sweep: config: Field required; keys: Field required"),
        ("text", "expected a mapping"),
    ],
)
def test_a_file_that_is_no_sweep(tmp_path: Path, given: Any, why: str):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(ConfigError, match=why):
        read_sweep(tmp_path / "sweep.yaml")


def test_numbers_are_read_as_in_a_configuration(tmp_path: Path):
    (tmp_path / "sweep.yaml").write_text("config: c.yaml\nkeys: {optimizer.learning_rate: [1e-6, 5e-4]}\n")
    assert read_sweep(tmp_path / "sweep.yaml").keys == {"optimizer.learning_rate": [1e-6, 5e-4]}


def test_a_range_has_no_grid():
    with pytest.raises(ConfigError, match="set runs"):
        list(Sweep.model_validate({"config": "c", "keys": {"a": {"low": 0, "high": 1}}}).settings())


def test_runs_follow_each_other_and_the_best_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = {"name": "r", "dir": str(tmp_path / "runs"), "steps": 1}
    base = {"run": run, "model": {"path": str(tmp_path)}, "data": {"path": str(tmp_path / "p.jsonl")},
            "rewards": {"functions": ["r.f"]}}  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base))
    keys = {"optimizer.learning_rate": [1e-6, 1e-5, 1e-4]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"config": "config.yaml", "keys": keys}))
    started: list[list[str]] = []

    def train(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        started.append(command)
        directory = tmp_path / "runs" / f"r-{len(started):02d}"
        directory.mkdir(parents=True)
        values = {"reward": float(len(started))}
        line = {"type": "step", "step": 1, "time": 0.0, "values": values, "findings": [], "evaluation": None}
        (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return subprocess.CompletedProcess(command, 0 if len(started) < 3 else 4)

    compared: list[Any] = []
    monkeypatch.setattr(commands.subprocess, "run", train)
    monkeypatch.setattr(commands, "write_compare", lambda runs, out: compared.append(runs) or out)
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "sweep.yaml")])
    assert isinstance(result.exception, ConfigError) and "1 of 3 runs failed" in str(result.exception)
    assert [one[-3:] for one in started] == [
        [f"optimizer.learning_rate={rate}", "--set", f'run.name="r-0{number}"'] for number, rate in
        enumerate(("1e-06", "1e-05", "0.0001"), start=1)
    ]  # fmt: skip
    assert [path.name for path in compared[0]] == ["r-01", "r-02"]
    said = result.output
    assert said.index("r-02: reward 2") < said.index("r-01: reward 1")
