"""A package of a third party adds commands, rewards, sinks, rollouts, sources and engines by entry points alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.common.contracts import load_part
from lachesis.common.errors import ConfigError
from lachesis.config.load import dump_config, load_config
from lachesis.config.rules import check
from lachesis.config.schema import CustomEngineConfig, EpisodesSourceConfig, LachesisConfig, LocalSourceConfig
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
    def __init__(self, trained, *, section, token=0):
        self.trained, self.token = trained, token or section.token

    def refuse(self, *given, **named):
        raise NotImplementedError

    generate = canary = set_version = health = pause = resume = close = refuse

def walk(prompts, trainer, *, turns=1):
    return {"turns": turns}
"""
SECTIONS = """
from typing import Literal
from pydantic import Field
from lachesis.config.section import BaseEngineConfig, EpisodesSourceConfig, PositiveInt, Section

class Spun(BaseEngineConfig):
    builds = "looms.Fixed"
    place = "trainer"
    kind: Literal["spun"] = "spun"
    token: PositiveInt = Field(default=3, description="The token.")

class Thread(Section):
    colour: str = Field(description="Its colour.")

class Woven(EpisodesSourceConfig):
    builds = "looms.players"
    kind: Literal["woven"] = "woven"
    turns: PositiveInt = Field(default=2, description="Turns.")
    thread: Thread | None = Field(default=None, description="The thread.")

class Torn(Woven):
    pass
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

[lachesis.engines]
fixed = looms:Fixed
spun = loom_sections:Spun

[lachesis.sources]
woven = loom_sections:Woven
torn = loom_sections:Torn

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
    (site / "loom_sections.py").write_text(SECTIONS)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: looms\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in ("looms", "loom_sections"):
        sys.modules.pop(name, None)


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


PLAIN = """run: {steps: 1}
model: {path: model}
sampling: {max_completion_length: 4}
bridge: {kind: in_process}
"""


def load(tmp_path: Path, text: str) -> LachesisConfig:
    (tmp_path / "config.yaml").write_text(PLAIN + text)
    return load_config(tmp_path / "config.yaml").config


def test_a_source_and_an_engine_have_typed_sections_that_load_without_their_code(package: Path, tmp_path: Path):
    config = load(tmp_path, "source: {kind: woven, turns: 3, thread: {colour: red}}\nengine: {kind: spun, token: 7}\n")
    check(config)
    assert "looms" not in sys.modules
    assert isinstance(config, LachesisConfig) and isinstance(config.source, EpisodesSourceConfig)
    assert config.source.model_dump(exclude_defaults=True) == {"turns": 3, "thread": {"colour": "red"}}
    engine = custom_engine(config.engine, "the trained model")  # type: ignore[arg-type]
    assert (type(engine).__name__, engine.trained, engine.token) == ("Fixed", "the trained model", 7)  # type: ignore[attr-defined]
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml").config == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source:\n  kind: woven\n  turns: 0\n", r"source.turns \(line 7\): expected a whole number >= 1, got "),
        ("source:\n  kind: woven\n  trns: 1\n", r"source.trns \(line 7\): unknown key; did you mean source.turns\?"),
        ("source:\n  kind: woven\n  thread: {}\n", r"source.thread.colour.*missing, but required: Its colour."),
        ("source:\n  kind: torn\n", "source.kind torn: the entry point of lachesis.source names something other"),
        ("engine:\n  kind: fixed\n", "engine.kind fixed: the entry point of lachesis.engine names something other"),
        ("source:\n  kind: wovn\n", r"source.kind \(line 6\): expected .*woven.*; did you mean woven\?"),
    ],
)
def test_what_is_wrong_in_a_section_is_said_with_key_and_line(package: Path, tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, text)


def test_a_command_runs_and_is_in_the_help(package: Path):
    def lachesis(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(package)}
        command = [sys.executable, "-m", "lachesis", *words]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout

    assert lachesis("weave", "wool") == "wove wool\n"
    assert "weave" in lachesis("--help").partition("Installed:")[2]
