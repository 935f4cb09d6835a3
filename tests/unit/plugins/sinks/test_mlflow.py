"""MLflow: a stand-in that refuses what the real client refuses."""

from __future__ import annotations

import posixpath
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DependencyError
from lachesis.common.types import EvalResult, Finding, Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.console import CompletionPicker
from lachesis.plugins.sinks.mlflow import MlflowSink, metric_name
from lachesis.plugins.sinks.section import MlflowConfig

CONFIG = MlflowConfig(experiment="fates")


@dataclass(frozen=True)
class Metric:
    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Param:
    key: str
    value: str


@dataclass
class Store:
    """A tracking server: what it has, over all clients."""

    experiments: dict[str, str] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    status: str = ""


class Client:
    def __init__(self, store: Store) -> None:
        self.store = store

    def get_experiment_by_name(self, name: str) -> Any:
        number = self.store.experiments.get(name)
        return None if number is None else types.SimpleNamespace(experiment_id=number)

    def create_experiment(self, name: str) -> str:
        if name in self.store.experiments:
            raise RuntimeError("RESOURCE_ALREADY_EXISTS")
        self.store.experiments[name] = str(len(self.store.experiments) + 1)
        return self.store.experiments[name]

    def create_run(self, experiment_id: str, *, run_name: str | None = None) -> Any:
        assert experiment_id in self.store.experiments.values()
        self.store.runs.append(str(run_name))
        self.store.status = "RUNNING"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"id{len(self.store.runs)}"))

    def update_run(self, run_id: str, *, status: str) -> None:
        self._known(run_id)
        self.store.status = status

    def set_terminated(self, run_id: str, status: str = "FINISHED") -> None:
        self._known(run_id)
        self.store.status = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self._known(run_id)
        if len(metrics) > 1000 or len(params) > 100:
            raise RuntimeError("A batch logging request can contain at most 1000 metrics, 100 params")
        for metric in metrics:
            self._check_name(metric.key)
            assert isinstance(metric.timestamp, int) and isinstance(metric.value, float | int)
            self.store.metrics.append(metric)
        for param in params:
            self._check_name(param.key)
            if len(param.value) > 6000:
                raise RuntimeError("Param value exceeded the maximum length")
            if self.store.params.setdefault(param.key, param.value) != param.value:
                raise RuntimeError("Changing param values is not allowed")

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._known(run_id)
        self._check_name(key)
        self.store.tags[key] = value

    def log_dict(self, run_id: str, dictionary: dict[str, Any], artifact_file: str) -> None:
        self._known(run_id)
        self.store.artifacts[artifact_file] = dictionary

    def _known(self, run_id: str) -> None:
        if run_id not in {f"id{number + 1}" for number in range(len(self.store.runs))}:
            raise RuntimeError(f"Run '{run_id}' not found")

    @staticmethod
    def _check_name(name: str) -> None:
        norm = posixpath.normpath(name)
        unique = norm == name and norm != "." and not norm.startswith(("..", "/"))
        if not re.fullmatch(r"[/\w.\- ]*", name) or not unique or len(name) > 250:
            raise RuntimeError(f"Invalid value {name!r} for parameter 'name'")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient = lambda tracking_uri=None: Client(found)  # type: ignore[attr-defined]
    entities.Metric, entities.Param = Metric, Param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return found


def sink(run_dir: Path, **options: Any) -> MlflowSink:
    settings = {"run": {"steps": 3, "seed": 0}, "model": {"chat_template": "x" * 9000}}
    return MlflowSink(CONFIG, run_dir=run_dir, run_name="quickstart", settings=settings, **options)


def test_a_run_of_its_experiment_has_the_configuration(tmp_path: Path, store: Store):
    sink(tmp_path).close()
    assert (store.runs, list(store.experiments), store.status) == (["quickstart"], ["fates"], "FINISHED")
    assert store.params["run.steps"] == "3"
    assert len(store.params["model.chat_template"]) == 6000
    sink(tmp_path)
    assert len(store.experiments) == 1, "the experiment is there"


def test_values_evaluations_and_findings(tmp_path: Path, store: Store):
    one = sink(tmp_path)
    one.evaluation(EvalResult(0, 0.25, 0.3, 8, 3.0, 0.1))
    odd = {"reward": 0.5, "rewards//home/me/r.py:f/mean": 1.0, **{f"m{n}": 1.0 for n in range(1200)}}
    one.write(StepRecord(step=2, values=odd, findings=[Finding("warning", "rule", "words")]))
    logged = {(metric.key, metric.step): metric.value for metric in store.metrics}
    assert logged["evaluation/accuracy", 0] == 0.25
    assert logged["reward", 2] == 0.5
    assert logged["rewards/home/me/r.py_f/mean", 2] == 1.0
    assert store.tags == {"health.rule": "step 2: warning: words"}


@pytest.mark.parametrize("name", ["a/../b", "/x", "../y", "..", "{}", "reward_metrics/tool calls", "ö:1"])
def test_every_name_is_one_that_it_takes(name: str):
    Client._check_name(metric_name(name))


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, store: Store):
    sink(tmp_path).close()
    sink(tmp_path, resume_step=2).write(StepRecord(step=3, values={"reward": 1.0}))
    assert (store.runs, store.status) == (["quickstart"], "RUNNING")
    assert [metric.step for metric in store.metrics] == [3]


def test_completions_are_a_table(tmp_path: Path, store: Store):
    sample = Sample((1,), (2,), (0.0,), "stop", VersionSpan(0, 0), text="4", rewards=(1.0,), reward=1.0)
    picker = CompletionPicker(count=1, reward_names=["right"], decode=str)
    record = StepRecord(step=1, values={}, groups=[Group(Prompt("0", (1,), "2+2="), (sample, sample))])
    sink(tmp_path, completions=picker).write(record)
    assert store.artifacts["completions/step_1.json"] == {
        "columns": ["step", "prompt", "completion", "reward", "right"],
        "data": [[1, "2+2=", "4", 1.0, 1.0]],
    }


def test_what_keeps_it_from_starting_is_said(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Client, name: str) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(Client, "get_experiment_by_name", refuse)
    said = r"MLflow did not start: ConnectionError: no server -> check .*tracking_uri.* needs the package mlflow"
    with pytest.raises(ConfigError, match=said):
        sink(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    with pytest.raises(DependencyError, match=r"lachesis\[mlflow\]"):
        sink(tmp_path)
