"""A package of a third party adds a command, a reward and a sink by entry points alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.metrics.custom import custom_sinks
from lachesis.rollouts.rewards.loading import ImportPath, load_named

CODE = """
from lachesis import Sink

def short(completions, **columns):
    return [-float(len(text)) for text in completions]

class Note(Sink):
    def __init__(self, run_dir, **rest):
        self.run_dir = run_dir

    def write(self, record):
        (self.run_dir / "note").write_text(str(record.step))
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


def test_a_command_runs_and_is_in_the_help(package: Path):
    def lachesis(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(package)}
        command = [sys.executable, "-m", "lachesis", *words]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout

    assert lachesis("weave", "wool") == "wove wool\n"
    assert "weave" in lachesis("--help").partition("Installed:")[2]
