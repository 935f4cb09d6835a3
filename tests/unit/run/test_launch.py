"""The engine that is launched before the rest of a run: who stops it, and what is left of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lachesis.common.errors import ConfigError, DataError
from lachesis.config.load import LoadedConfig
from lachesis.engines import build
from lachesis.run.launch import launched_engine, set_up, starts_engine
from tests.ports import free_port
from tests.waiting import until

# A server that says where it is, and goes on until it is stopped.
WAITS = [sys.executable, "-S", "-c", "import os, time; print(os.getcwd(), flush=True); time.sleep(60)"]


@pytest.fixture
def loaded(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedConfig:
    """Of a run that starts a server of its own, which is another program here."""
    monkeypatch.setattr(build, "server_command", lambda *_, **__: WAITS)
    sections: dict[str, Any] = {
        "run": {"name": "run", "dir": str(tmp_path / "runs"), "steps": 1},
        "engine": {"kind": "embedded_server", "port": free_port()},
        "bridge": {"kind": "broadcast"},
    }
    return LoadedConfig(config({"path": "train.jsonl"}, **sections), tmp_path)


def test_what_may_take_long_before_the_first_step_is_said_first(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.py").write_text("def build(path): print('built', path)\n")
    name = f"{tmp_path / 'mine.py'}:build"
    built = config({"path": "train.jsonl"}, run={"steps": 1, "setup": name})
    set_up(built, console=Console(width=500))
    said = capsys.readouterr().out.splitlines()
    assert said == [f"run.setup: {name} prepares the run", f"built {built.model.path}"]


def test_a_start_of_vllm_is_announced_with_its_log(
    loaded: LoadedConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    engine = {"kind": "vllm", "port": free_port()}
    tree = loaded.config.model_dump() | {"engine": engine}
    over_vllm = replace(loaded, config=type(loaded.config).model_validate(tree))
    with launched_engine(over_vllm, resume=False, overwrite=False, console=Console(width=500)) as launched:
        assert launched.age_s >= 0.0
    said = capsys.readouterr().out
    log = f"{tmp_path}/runs/.run.engine.log"
    assert said == f"engine: vLLM is starting; the first time takes minutes; log: {log}\n"


def test_what_nobody_takes_is_stopped_and_leaves_nothing(loaded: LoadedConfig, tmp_path: Path):
    with (
        pytest.raises(DataError),
        launched_engine(loaded, resume=False, overwrite=False, console=None) as launched,
    ):
        (process,) = launched.processes
        until(lambda: process.log_path.read_text())
        assert process.pid is not None and process.log_path == tmp_path / "runs/.run.engine.log"
        raise DataError("no problem is short enough")
    assert process.pid is None
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_is_taken_is_stopped_too_and_keeps_its_log(loaded: LoadedConfig):
    with launched_engine(loaded, resume=False, overwrite=False, console=None) as launched:
        (process,) = launched.take()
        until(lambda: process.log_path.read_text())
    assert process.pid is None and process.log_path.exists()


def test_what_setup_draws_at_random_is_settled_by_the_runs_seed(loaded: LoadedConfig, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import pathlib, random, torch\n"
        "def build(path): pathlib.Path(path, 'drawn').write_text(f'{random.random()} {torch.rand(1)}')\n"
    )
    run = loaded.config.run.model_copy(update={"setup": f"{tmp_path / 'mine.py'}:build"})
    loaded = replace(loaded, config=loaded.config.model_copy(update={"run": run}))
    drawn = []
    for _ in range(2):
        with launched_engine(loaded, resume=False, overwrite=False, console=None):
            drawn.append((tmp_path / "model/drawn").read_text())
    assert drawn[0] == drawn[1]


def test_nothing_is_started_where_the_directory_is_not_the_runs(loaded: LoadedConfig, tmp_path: Path):
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/notes.txt").touch()
    with (
        pytest.raises(ConfigError, match="is not empty and holds no run"),
        launched_engine(loaded, resume=False, overwrite=False, console=None),
    ):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_engines_of_others_and_in_this_process_are_not_started(config: Any):
    engines = {"http": {"urls": ["http://localhost:9001"]}, "embedded": {}, "embedded_server": {}, "vllm": {}}
    started = {
        kind: starts_engine(
            config(
                {"path": "train.jsonl"},
                engine={"kind": kind, **keys},
                bridge={"kind": "in_process" if kind == "embedded" else "broadcast"},
            )
        )
        for kind, keys in engines.items()
    }
    assert started == {"http": False, "embedded": False, "embedded_server": True, "vllm": True}
