from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lachesis.common.errors import DataError
from lachesis.common.types import EvalResult, Finding, StepRecord
from lachesis.metrics.sinks.jsonl import JsonlSink, read_metrics


def evaluation(step: int, accuracy: float = 0.5) -> EvalResult:
    return EvalResult(step, accuracy, accuracy, problems=512, mean_length=3.5, seconds=0.4)


def write(path: Path, steps: range, *, resume_step: int | None = None, reward: float = 0.5) -> None:
    sink = JsonlSink(path, resume_step=resume_step, clock=lambda: 1000.0)
    for step in steps:
        sink.write(StepRecord(step=step, values={"reward": reward}))
    sink.close()


def test_lines_have_the_documented_form(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 1000.5)
    sink.evaluation(evaluation(0))
    finding = Finding("warning", "kl_high", "mean_kl is “high”")
    values = {"loss": math.nan, "reward": 0.25}
    sink.write(StepRecord(step=1, values=values, evaluation=evaluation(1), findings=[finding], ended=1001.5))
    first, second = [json.loads(line) for line in path.read_text().splitlines()]  # flushed before close
    sink.close()
    assert first["type"] == "evaluation" and first["step"] == 0 and first["problems"] == 512
    assert first["time"] == 1000.5
    assert second == {
        "type": "step",
        "step": 1,
        "time": 1001.5,
        "values": {"loss": None, "reward": 0.25},
        "findings": [{"level": "warning", "rule": "kl_high", "message": "mean_kl is “high”"}],
        "evaluation": {
            "step": 1, "accuracy": 0.5, "mean_reward": 0.5, "problems": 512, "mean_length": 3.5, "seconds": 0.4,
            "samples": 1, "pass_at_k": None, "benchmarks": {}, "by_source": {},
        },
    }  # fmt: skip
    log = read_metrics(path)
    assert log.evaluations == (evaluation(0), evaluation(1))
    assert log.steps[0].findings == (finding,)
    assert math.isnan(log.steps[0].values["loss"]) and log.steps[0].values["reward"] == 0.25


def test_resume_drops_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"type": "step", "st')  # torn by a kill
    write(path, range(5, 7), resume_step=4, reward=0.9)
    log = read_metrics(path)
    assert [line.step for line in log.steps] == [1, 2, 3, 4, 5, 6]
    assert [line.values["reward"] for line in log.steps] == [0.5] * 4 + [0.9] * 2
    assert len(path.read_text().splitlines()) == 6


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    write(path, range(1, 2))
    assert [line.step for line in read_metrics(path).steps] == [1]


def test_resume_without_a_file_begins_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(5, 6), resume_step=4)
    assert [line.step for line in read_metrics(path).steps] == [5]


def test_a_file_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    path.write_text(path.read_text() + '{"type": "step", "step": 3, "ti')
    assert [line.step for line in read_metrics(path).steps] == [1, 2]


@pytest.mark.parametrize(
    "line", ["{torn", "[1]", '{"type": "step"}', '{"type": "step", "step": 2, "time": 1, "values": 3}']
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 2))
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not a line of metrics"):
        read_metrics(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")
