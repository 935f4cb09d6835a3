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
from lachesis.run import launch
from lachesis.run.launch import begin_imports, launched_engine, set_up, starts_engine
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
    assert said == [f"run.setup: {name} makes ready what the run needs", f"built {built.model.path}"]


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


class TestImports:
    """What several servers need is imported once, and sooner than they can be started."""

    @pytest.fixture
    def begun(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        begun: list[Any] = []
        monkeypatch.setattr(launch, "ForkServer", lambda *given, **named: begun.append((given, named)))
        monkeypatch.setattr(launch.util, "find_spec", lambda name: name == "vllm")
        return begun

    @pytest.mark.parametrize("value", [None, "0", "1"])
    def test_they_can_be_done_without(
        self, value: str | None, config: Any, tmp_path: Path, begun: list[Any], monkeypatch: pytest.MonkeyPatch
    ):
        if value is not None:
            monkeypatch.setenv(launch.SHARED_IMPORTS, value)
        built = config({"path": "train.jsonl"}, engine={"kind": "vllm"}, bridge={"kind": "broadcast"})
        begin_imports(built, log_path=tmp_path / "engine.log")
        assert len(begun) == (value != "0")

    def test_they_are_those_of_the_model_and_in_no_rank(
        self, config: Any, tmp_path: Path, begun: list[Any], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        flags = ["--quantization", "torchao"]
        engine = {"kind": "vllm", "data_parallel_size": 2, "devices": "1,2", "extra_args": flags}
        built = config({"path": "train.jsonl"}, engine=engine, bridge={"kind": "broadcast"})
        log = tmp_path / "engine.log"
        log.write_text("of the run before\n")
        begin_imports(built, log_path=log)
        ((module, arguments), named) = begun[0]
        assert (module, arguments) == (
            "lachesis.engines.vllm.preload",
            [built.model.path, *flags],
        )
        assert named["log_path"] == log and not log.exists()
        assert named["env"]["CUDA_VISIBLE_DEVICES"] == "1,2"
        assert named["env"]["HF_HOME"] == str(tmp_path) and "TORCHELASTIC_USE_AGENT_STORE" not in named["env"]

    @pytest.mark.parametrize("without", ["vLLM", "the engine", "Linux"])
    def test_there_are_none_where_they_would_be_no_help(
        self, without: str, config: Any, tmp_path: Path, begun: list[Any], monkeypatch: pytest.MonkeyPatch
    ):
        if without == "vLLM":
            monkeypatch.setattr(launch.util, "find_spec", lambda name: None)
        if without == "Linux":
            monkeypatch.setattr(sys, "platform", "darwin")
        kind = "embedded_server" if without == "the engine" else "vllm"
        built = config({"path": "train.jsonl"}, engine={"kind": kind}, bridge={"kind": "broadcast"})
        assert begin_imports(built, log_path=tmp_path / "engine.log") is None and begun == []
