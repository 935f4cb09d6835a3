from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lachesis.common.errors import DependencyError
from lachesis.common.types import EvalResult, Finding, StepRecord
from lachesis.plugins.sinks.tensorboard import TensorBoardSink


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(DependencyError, match=r'pip install "lachesis\[tensorboard\]"'):
        TensorBoardSink(tmp_path)


def test_values_evaluations_and_findings_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra of the package")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.evaluation(EvalResult(0, 0.25, 0.25, 8, 3.0, 0.1))
    finding = Finding("problem", "kl_high", "lower it")
    for step in (1, 2):
        sink.write(StepRecord(step=step, values={"rewards/exact/mean": step / 4}, findings=[finding]))
    sink.write(StepRecord(step=3, values={}, evaluation=EvalResult(3, 0.75, 0.7, 8, 3.0, 0.1)))
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("rewards/exact/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("evaluation/accuracy")] == [(0, 0.25), (3, 0.75)]
    assert "health/kl_high/text_summary" in events.Tags()["tensors"]


def test_resumed_run_hides_later_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra of the package")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        sink = TensorBoardSink(tmp_path, resume_step=resume_step)
        for step in steps:
            sink.write(StepRecord(step=step, values={"reward": float(resume_step or 0)}))
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.0), (2, 1.0)]
