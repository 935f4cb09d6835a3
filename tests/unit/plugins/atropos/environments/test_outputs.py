"""What environments write: files, and Weights & Biases."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DependencyError
from lachesis.common.types import EvalResult
from lachesis.plugins.atropos.environments.outputs import Counters, Outputs

RESULT = EvalResult(step=7, accuracy=0.5, mean_reward=0.25, problems=4, mean_length=3.0, seconds=1.0)


class FakeWandb:
    """Takes note of what it is given."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.logged: list[dict[str, float]] = []
        self.defined: list[tuple[str, dict[str, str]]] = []
        self.finished = False

    def init(self, **settings: Any) -> Any:
        self.settings = settings
        return SimpleNamespace(
            log=self.logged.append,
            finish=lambda: setattr(self, "finished", True),
            define_metric=lambda name, **options: self.defined.append((name, options)),
        )


def test_files(tmp_path):
    outputs = Outputs(log_dir=tmp_path / "a", evals_dir=tmp_path / "b")
    outputs.metrics(3, {"groups": 2.0})
    outputs.evaluation("numbers", RESULT)
    outputs.close()
    first, second = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert (first["type"], first["step"], first["values"]) == ("step", 3, {"groups": 2.0})
    (evaluation,) = [json.loads(line) for line in (tmp_path / "b" / "evaluations.jsonl").read_text().splitlines()]
    assert second == evaluation and evaluation["accuracy"] == 0.5 and evaluation["environment"] == "numbers"


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--env\.log_dir"):
        Outputs(log_dir=tmp_path / "file")


def test_wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    outputs = Outputs()
    outputs.start_wandb(project="p", group="g", name="numbers_0", settings={"group_size": 4})
    outputs.metrics(3, {"groups": 2.0})
    outputs.evaluation("numbers", RESULT)
    outputs.close()
    assert (fake.settings["project"], fake.settings["group"], fake.settings["name"]) == ("p", "g", "numbers_0")
    assert fake.logged == [
        {"step": 3, "numbers_0_groups": 2.0},
        {"step": 7, "numbers_0_eval/accuracy": 0.5, "numbers_0_eval/mean_reward": 0.25},
    ]
    assert ("*", {"step_metric": "step"}) in fake.defined
    assert fake.finished


def test_wandb_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyError, match="wandb cannot be imported"):
        Outputs().start_wandb(project=None, group=None, name="x", settings={})


def test_tallies_add_up():
    counters, more = Counters(groups=1, sequences=4, score_sum=2.0), Counters(groups=2, sequences=4, failures=1)
    more.dropped["reason"] += 3
    counters.add(more)
    values = counters.values()
    assert (values["groups"], values["score/mean"], values["failures"], values["dropped"]) == (3, 0.25, 1, 3)
    assert "score/mean" not in Counters().values()
