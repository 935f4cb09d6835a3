"""Trackio: a stand-in that refuses what the real package refuses."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DependencyError
from lachesis.common.types import EvalResult, Finding, Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.console import CompletionPicker
from lachesis.plugins.sinks.section import TrackioConfig
from lachesis.plugins.sinks.trackio import TrackioSink

RESERVED = {"project", "run", "timestamp", "step", "time", "metrics"}


class AlertLevel(enum.Enum):
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class Run:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.logged: dict[int, dict[str, Any]] = {}
        self.alerts: list[tuple[Any, ...]] = []
        self.finished = False

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert not self.finished
        assert not [name for name in metrics if name in RESERVED or name.startswith("__")], "they would be renamed"
        assert step is not None
        self.logged.setdefault(step, {}).update(metrics)

    def alert(self, title: str, text: str | None, level: AlertLevel, step: int | None) -> None:
        self.alerts.append((title, text, level, step))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    made: list[Run] = []
    module = types.ModuleType("trackio")

    def init(*, project: str, name: str, space_id: str | None, config: dict[str, Any], resume: str) -> Run:
        sys.stdout.write("* Trackio project initialized\n")
        if resume not in ("must", "allow", "never"):
            raise ValueError("resume must be one of: 'must', 'allow', or 'never'")
        if bad := [key for key in config if key.startswith("_")]:
            raise ValueError(f"Config key '{bad[0]}' is reserved")
        made.append(Run({"project": project, "name": name, "space_id": space_id, "config": config, "resume": resume}))
        return made[-1]

    module.init, module.AlertLevel = init, AlertLevel  # type: ignore[attr-defined]
    module.Table = lambda columns, data: (columns, data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    return made


def sink(**options: Any) -> TrackioSink:
    return TrackioSink(TrackioConfig(project="fates"), run_name="quickstart", settings={"run": {"steps": 3}}, **options)


def test_values_evaluations_findings_and_nothing_on_the_screen(runs: list[Run], capsys: pytest.CaptureFixture[str]):
    one = sink()
    one.evaluation(EvalResult(0, 0.25, 0.3, 8, 3.0, 0.1))
    findings = [Finding("warning", "rule", "words"), Finding("problem", "other", "more")]
    one.write(StepRecord(step=1, values={"reward": 0.5}, findings=findings))
    one.close()
    (run,) = runs
    assert run.options["config"] == {"run": {"steps": 3}}
    assert (run.options["name"], run.options["resume"], run.finished) == ("quickstart", "never", True)
    assert run.logged[0]["evaluation/accuracy"] == 0.25
    assert run.logged[1] == {"reward": 0.5}
    assert run.alerts == [("rule", "words", AlertLevel.WARN, 1), ("other", "more", AlertLevel.ERROR, 1)]
    assert capsys.readouterr().out == ""


def test_a_resumed_run_goes_on_under_its_name(runs: list[Run]):
    sink(resume_step=4)
    assert runs[0].options["resume"] == "allow"


def test_completions_are_a_table(runs: list[Run]):
    sample = Sample((1,), (2,), (0.0,), "stop", VersionSpan(0, 0), text="4", rewards=(1.0,), reward=1.0)
    picker = CompletionPicker(count=1, reward_names=["right"], decode=str)
    record = StepRecord(step=1, values={}, groups=[Group(Prompt("0", (1,), "2+2="), (sample,))])
    sink(completions=picker).write(record)
    columns = ["step", "prompt", "completion", "reward", "right"]
    assert runs[0].logged[1]["completions"] == (columns, [[1, "2+2=", "4", 1.0, 1.0]])


def test_what_keeps_it_from_starting_is_said(runs: list[Run], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="Trackio did not start: ValueError: Config key '_x' is reserved"):
        TrackioSink(TrackioConfig(project="fates"), run_name="r", settings={"_x": 1})
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(DependencyError, match=r"lachesis\[trackio\]"):
        sink()
