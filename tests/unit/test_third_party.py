"""A package of a third party adds a command, a reward, a sink, rollouts and an engine by entry points alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.common.contracts import load_part
from lachesis.config.load import load_config
from lachesis.config.schema import CustomEngineConfig, LocalSourceConfig
from lachesis.engines.build import custom_engine
from lachesis.metrics.custom import custom_sinks
from lachesis.rollouts.base import ROLLOUTS
from lachesis.rollouts.rewards.loading import ImportPath, load_named

CODE = """
from lachesis import Engine, Sink

def short(completions, **columns):
    return [-float(len(text)) for text in completions]

class Note(Sink):
    def __init__(self, run_dir, **rest):
        self.run_dir = run_dir

    def write(self, record):
        (self.run_dir / "note").write_text(str(record.step))

class Fixed(Engine):
    def __init__(self, trained, *, token):
        self.trained, self.token = trained, token

    def refuse(self, *given, **named):
        raise NotImplementedError

    generate = canary = set_version = health = pause = resume = close = refuse

def walk(prompts, trainer, *, turns=1):
    return {"turns": turns}
"""
COMMANDS = """
from lachesis.cli.base import app, console

@app.command("weave")
def weave(thread: str) -> None:
    console.print(f"wove {thread}")
"""
ENTRY_POINTS = """
[lachesis.commands]
weave = loom_commands

[lachesis.rewards]
short = looms:short

[lachesis.sinks]
note = looms:Note

[lachesis.engine]
fixed = looms:Fixed

[lachesis.rollout_function]
walk = looms:walk
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with an installed package, on the path."""
    site = tmp_path / "site"
    information = site / "looms-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "looms.py").write_text(CODE)
    (site / "loom_commands.py").write_text(COMMANDS)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: looms\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("looms", None)


def test_a_reward_and_a_sink_are_found_by_name(package: Path, tmp_path: Path):
    assert load_named(ImportPath("short", tmp_path))(completions=["ab", "a"]) == [-2.0, -1.0]
    (sink,) = custom_sinks(["note"], run_dir=tmp_path, settings={}, resume_step=None)
    assert type(sink).__name__ == "Note"


def test_an_engine_and_rollouts_have_sections_with_arguments_of_their_own(package: Path, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(
        "run: {steps: 1}\nmodel: {path: model}\ndata: {path: rows.jsonl}\nrewards: {functions: [short]}\n"
        "sampling: {max_completion_length: 4}\nbridge: {kind: in_process}\n"
        "engine: {kind: custom, function: {function: fixed, kwargs: {token: 7}}}\n"
        "source: {kind: local, rollout_func: {function: walk, kwargs: {turns: 3}}}\n"
    )
    config = load_config(tmp_path / "config.yaml").config
    assert isinstance(config.engine, CustomEngineConfig) and isinstance(config.source, LocalSourceConfig)
    engine = custom_engine(config.engine, "the trained model")  # type: ignore[arg-type]
    assert (type(engine).__name__, engine.trained, engine.token) == ("Fixed", "the trained model", 7)  # type: ignore[attr-defined]
    assert config.source.rollout_func is not None
    assert load_part(config.source.rollout_func, ROLLOUTS)([], None) == {"turns": 3}


def test_a_command_runs_and_is_in_the_help(package: Path):
    def lachesis(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(package)}
        command = [sys.executable, "-m", "lachesis", *words]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout

    assert lachesis("weave", "wool") == "wove wool\n"
    assert "weave" in lachesis("--help").partition("Installed:")[2]
