from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DependencyError
from lachesis.common.types import EvalResult, Finding, Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.console import CompletionPicker
from lachesis.plugins.sinks.section import WandbConfig
from lachesis.plugins.sinks.wandb import WandbSink

CONFIG = WandbConfig(project="fates", group="quick", mode="offline")


class FakeRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.defined: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A wandb that keeps what it is given."""
    made: list[FakeRun] = []
    module = types.ModuleType("wandb")

    def init(**options: Any) -> FakeRun:
        made.append(FakeRun(options))
        return made[-1]

    def login(*, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify, "neither the terminal nor the network is asked"
        return "WANDB_API_KEY" in os.environ

    module.init = init  # type: ignore[attr-defined]
    module.login = login  # type: ignore[attr-defined]
    module.Table = lambda columns, data: (columns, data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def sink(run_dir: Path, **options: Any) -> WandbSink:
    return WandbSink(CONFIG, run_dir=run_dir, run_name="quickstart", settings={"run": {"steps": 3}}, **options)


def test_run_is_named_and_configured(tmp_path: Path, runs: list[FakeRun]) -> None:
    sink(tmp_path)
    options = runs[0].options
    assert {key: options[key] for key in ("project", "group", "name", "mode", "dir")} == {
        "project": "fates", "group": "quick", "name": "quickstart", "mode": "offline", "dir": str(tmp_path)
    }  # fmt: skip
    assert options["config"] == {"run": {"steps": 3}}
    assert ("*", "step") in runs[0].defined


def test_values_evaluations_and_findings_are_logged_with_our_step(tmp_path: Path, runs: list[FakeRun]) -> None:
    logging = sink(tmp_path)
    logging.evaluation(EvalResult(0, 0.25, 0.3, 8, 3.0, 0.1))
    logging.write(StepRecord(step=1, values={"reward": 0.5}, findings=[Finding("note", "rule", "words")]))
    logging.close()
    first, second = runs[0].logged
    assert first["step"] == 0 and first["evaluation/accuracy"] == 0.25
    assert second == {"step": 1, "reward": 0.5, "health/rule": "note: words"}
    assert runs[0].finished


def test_completions_are_a_table(tmp_path: Path, runs: list[FakeRun]) -> None:
    picker = CompletionPicker(count=1, reward_names=["right", "short"], decode=str, every_steps=2)
    logging = sink(tmp_path, completions=picker)
    group = Group(
        Prompt("1", (1,), "2+2="),
        (Sample((1,), (4,), (0.0,), "stop", VersionSpan(0, 0), text="4", rewards=(1.0, None), reward=1.0),),
        logged={"extracted": [{4}]},
    )
    for step in (1, 2):
        logging.write(StepRecord(step=step, values={}, groups=[group]))
    first, second = runs[0].logged
    assert "completions" not in first
    assert second["completions"] == (
        ["step", "prompt", "completion", "reward", "right", "short", "extracted"],
        [[2, "2+2=", "4", 1.0, 1.0, None, "{4}"]],
    )


def test_resumed_run_goes_on_in_the_same_one(tmp_path: Path, runs: list[FakeRun]) -> None:
    sink(tmp_path)
    sink(tmp_path, resume_step=5)
    sink(tmp_path)
    first, resumed, anew = (run.options["id"] for run in runs)
    assert first == resumed != anew
    assert all(run.options["resume"] == "allow" for run in runs)


def test_without_wandb_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyError, match=r'pip install "lachesis\[wandb\]"'):
        sink(tmp_path)


def test_a_refusal_becomes_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("wandb")

    def init(**_: Any) -> None:
        raise RuntimeError("api_key not configured")

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError, match="api_key not configured -> run `wandb login`"):
        sink(tmp_path)


@pytest.mark.parametrize(
    ("environment", "mode"),
    [({}, "offline"), ({"WANDB_API_KEY": "k"}, "online"), ({"WANDB_MODE": "disabled"}, None)],
)
def test_without_a_login_the_run_is_logged_offline_and_says_so_once(
    tmp_path: Path,
    runs: list[FakeRun],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environment: dict[str, str],
    mode: str | None,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        WandbSink(WandbConfig(project="fates"), run_dir=tmp_path, run_name="quickstart", settings={})
    assert runs[0].options["mode"] == mode
    assert caplog.text.count("wandb login") == (mode == "offline")


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_without_the_package_only_what_was_asked_for_is_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wanted = WandbConfig.model_validate({"project": "fates", "mode": mode}).is_wanted()
    assert wanted == (mode == "online")
    assert ("not installed" in caplog.text) == (mode == "auto")
