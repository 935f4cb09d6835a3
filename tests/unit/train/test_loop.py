"""The loop alone: what it asks of its parts, in which order, and what it tells."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.bridges.base import SyncReport
from lachesis.common.errors import StaleWeights, StopRequested, TrainingError
from lachesis.common.types import EvalResult, Group, Prompt
from lachesis.metrics.values import Mean, Sum
from lachesis.train.batch import Batch
from lachesis.train.loop import Clock, Trainer


def test_it_is_as_short_as_the_readme_says():
    lines, _ = inspect.getsourcelines(Trainer.train)
    assert len(lines) < 50


@dataclass
class Parts:
    """Everything that the loop talks to. ``calls`` is what was asked, in order."""

    evaluate_at: tuple[int, ...] = ()
    stop_after: int | None = None
    stop_waiting_after: int | None = None
    stop_pausing_after: int | None = None
    pause_s: float = 0.0
    fail_in: str = ""
    report: SyncReport | None = None
    calls: list[str] = field(default_factory=list)
    emitted: list[dict[str, Any]] = field(default_factory=list)
    step_now: int = 0

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.fail_in and what.startswith(self.fail_in):
            raise TrainingError(f"{what} failed")

    @property
    def last_report(self) -> SyncReport | None:
        return self.report

    @property
    def engine(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=lambda: {"prefix_cache_hit_rate": Mean(1.0, 4.0)})

    def sync(self, version: int) -> None:
        self._call(f"sync {version}")

    def rest(self) -> None:
        self._call("rest")

    def retry(self, call: Callable[[], Any]) -> Any:
        return call()

    @contextmanager
    def update_to(self, version: int, *, due: bool = False) -> Iterator[None]:
        self._call(f"enter update {version}{' due' if due else ''}")
        try:
            yield
            self._call(f"transfer {version}")
        finally:
            self.calls.append(f"leave update {version}")

    def next(self) -> Batch:
        self._call("next")
        if self.step_now == self.stop_waiting_after:
            raise StopRequested("while it waited")
        group = Group(prompt=Prompt(id=f"of step {self.step_now + 1}", token_ids=(1,), text=""), samples=())
        return Batch(groups=(group,), micro_batches=(), num_sequences=1, num_tokens=1)

    def accumulate(self, batch: Batch) -> dict[str, Any]:
        self._call("accumulate")
        return {"loss": Sum(0.5)}

    def step(self) -> dict[str, Any]:
        self._call("optimizer step")
        return {"grad_norm": Mean(2.0)}

    def advance(self, step: int) -> None:
        self._call(f"advance {step}")
        self.step_now = step

    def counters(self) -> dict[str, float]:
        return {"tokens_generated": 7.0}

    def due(self, step: int) -> bool:
        return step in self.evaluate_at

    def maybe_run(self, step: int) -> EvalResult | None:
        self._call(f"evaluate? {step}")
        return EvalResult(step, 0.5, 0.5, 4, 2.0, 0.1) if step in self.evaluate_at else None

    def pause(self, step: int, meanwhile: Callable[[], None]) -> None:
        time.sleep(self.pause_s)
        if self.pause_s:
            self._call(f"pause after {step}")
            meanwhile()
        if step == self.stop_pausing_after:
            raise StopRequested("while it was paused")

    def save_if_asked(self, step: int, *, recorded: Callable[[], None]) -> None:
        assert recorded == self.flush
        self._call(f"save {step} if asked")

    def maybe_save(self, step: int, *, stopping: bool = False, recorded: Callable[[], None]) -> None:
        assert recorded == self.flush
        self._call(f"save? {step}{' stopping' if stopping else ''}")

    def take_metrics(self) -> dict[str, Any]:
        return {"checkpoint_write_time": Mean(0.5)}

    def evaluation(self, result: EvalResult | None) -> None:
        self._call(f"told of evaluation {result.step if result else None}")

    def emit(self, **what: Any) -> None:
        self._call(f"emit {what['step']}")
        self.emitted.append(what)

    def flush(self) -> None:
        raise AssertionError("a checkpoint asks for it")

    def stop_requested(self) -> bool:
        return self.stop_after is not None and self.step_now >= self.stop_after

    def trainer(self) -> Trainer:
        parts: Any = self
        return Trainer(
            policy=parts,
            feed=parts,
            bridge=parts,
            evaluation=parts,
            checkpoints=parts,
            telemetry=parts,
            stop_requested=self.stop_requested,
            pause=self.pause,
        )


def test_the_order_of_a_step():
    parts = Parts()
    assert parts.trainer().train(start=0, steps=1) == 1
    assert parts.calls == [
        "sync 0",
        "evaluate? 0",
        "told of evaluation None",
        "next",
        "rest",
        "accumulate",
        "enter update 1",
        "optimizer step",
        "transfer 1",
        "leave update 1",
        "advance 1",
        "evaluate? 1",
        "emit 1",
        "save? 1",
    ]


def test_every_step_is_told_with_its_own_groups_and_metrics():
    parts = Parts(
        evaluate_at=(0, 2),
        report=SyncReport(version=9, seconds=0.1, proof_seconds=0.02, canary_error=0.25, canary_ratio=0.5),
    )
    assert parts.trainer().train(start=0, steps=3) == 3
    assert [told["step"] for told in parts.emitted] == [1, 2, 3]
    assert [told["groups"][0].prompt.id for told in parts.emitted] == ["of step 1", "of step 2", "of step 3"]
    assert [told["evaluation"] and told["evaluation"].step for told in parts.emitted] == [None, 2, None]
    assert "told of evaluation 0" in parts.calls
    assert "enter update 2 due" in parts.calls, "the engine must have the weights that are evaluated"
    assert "enter update 3" in parts.calls
    for told in parts.emitted:
        metrics = told["metrics"]
        assert told["counters"] == {"tokens_generated": 7.0}
        assert (metrics["loss"], metrics["grad_norm"]) == (Sum(0.5), Mean(2.0))
        assert (metrics["weight_version"], metrics["canary_error"]) == (Mean(9.0), Mean(0.25))
        assert metrics["prefix_cache_hit_rate"].value() == 0.25, "what the engine has measured"
        assert (metrics["transfer_time"], metrics["proof_time"]) == (Mean(0.1), Mean(0.02))


def test_without_proof_there_is_no_canary_error():
    parts = Parts(report=SyncReport(version=1, seconds=0.1, proof_seconds=0.0, canary_error=None))
    parts.trainer().train(start=0, steps=1)
    assert "canary_error" not in parts.emitted[0]["metrics"]


def test_seconds_are_told_by_what_they_were_spent_on():
    parts = Parts()
    parts.trainer().train(start=0, steps=2)
    first, second = (told["metrics"] for told in parts.emitted)
    names = {"data_fetch_time", "train_time", "sync_time", "eval_time", "step_time"}
    assert names <= first.keys()
    assert names | {"checkpoint_time", "checkpoint_write_time"} <= second.keys(), (
        "the seconds of saving count with the next step"
    )
    for metrics in (first, second):
        parts_of_step = [metrics[n].value() for n in names | {"checkpoint_time"} if n != "step_time" and n in metrics]
        assert 0 <= sum(parts_of_step) <= metrics["step_time"].value()


def test_a_resumed_run_goes_on_after_its_start_without_the_first_evaluation():
    parts = Parts(evaluate_at=(4,))
    assert parts.trainer().train(start=4, steps=6) == 6
    assert parts.calls[:2] == ["sync 4", "next"]
    assert [told["step"] for told in parts.emitted] == [5, 6]


def test_a_run_that_is_finished_already_trains_no_more():
    parts = Parts()
    assert parts.trainer().train(start=5, steps=5) == 5
    assert parts.calls == ["sync 5"]


def test_a_stop_request_ends_the_run_after_the_step_with_a_checkpoint():
    parts = Parts(stop_after=2)
    assert parts.trainer().train(start=0, steps=9) == 2
    assert parts.calls[-2:] == ["emit 2", "save? 2 stopping"]
    assert parts.calls.count("next") == 2


@pytest.mark.parametrize("done", [0, 2])
def test_a_stop_request_while_a_batch_is_waited_for_ends_the_run_with_what_is_done(done: int):
    parts = Parts(stop_waiting_after=done)
    assert parts.trainer().train(start=0, steps=9) == done
    assert parts.calls[-2:] == ["next", f"save? {done} stopping"]
    assert [told["step"] for told in parts.emitted] == list(range(1, done + 1))


@pytest.mark.parametrize("done", [0, 2])
def test_a_stop_request_while_the_run_is_paused_ends_it_with_what_is_done(done: int):
    parts = Parts(stop_pausing_after=done)
    assert parts.trainer().train(start=0, steps=9) == done
    assert parts.calls[-1] == f"save? {done} stopping"
    assert parts.calls.count("next") == done


def test_a_pause_lies_between_two_steps_saves_what_is_asked_for_and_is_no_part_of_a_steps_seconds():
    parts = Parts(pause_s=0.05)
    parts.trainer().train(start=0, steps=2)
    at = parts.calls.index("pause after 1")
    assert parts.calls[at - 1 : at + 3] == ["save? 1", "pause after 1", "save 1 if asked", "next"]
    assert [told["metrics"]["step_time"].value() < 0.05 for told in parts.emitted] == [True, True]


def test_a_stop_request_during_the_last_step_lets_the_run_finish():
    parts = Parts(stop_after=3)
    assert parts.trainer().train(start=0, steps=3) == 3
    assert parts.calls[-1] == "save? 3"


@pytest.mark.parametrize(
    ("fail_in", "last"),
    [
        ("sync", "sync 0"),
        ("next", "next"),
        ("accumulate", "accumulate"),
        ("optimizer step", "leave update 1"),
        ("transfer", "leave update 1"),
    ],
)
def test_an_error_stops_everything_after_it(fail_in: str, last: str):
    parts = Parts(fail_in=fail_in)
    with pytest.raises(TrainingError):
        parts.trainer().train(start=0, steps=3)
    assert parts.calls[-1] == last
    assert not parts.emitted
    assert not [call for call in parts.calls if call.startswith(("advance", "save"))]


def test_stale_weights_are_never_saved_or_told():
    parts = Parts()

    @contextmanager
    def stale(version: int, *, due: bool) -> Iterator[None]:
        yield
        raise StaleWeights("the engine serves weight version 0")

    parts.update_to = stale  # type: ignore[method-assign]
    with pytest.raises(StaleWeights):
        parts.trainer().train(start=0, steps=3)
    assert parts.calls[-1] == "optimizer step"


def test_the_clock_adds_up_and_begins_anew():
    clock = Clock()
    for _ in range(2):
        with clock.measure("a"):
            pass
    taken = clock.take()
    assert set(taken) == {"a", "step_time"}
    assert set(clock.take()) == {"step_time"}
