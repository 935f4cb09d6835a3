from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.engines.serving.bodies import Refused
from lachesis.engines.vllm.drafts import (
    KEPT_STEPS,
    WINDOW_STEPS,
    DraftSwitch,
    StepSpeed,
    WorkerDrafts,
    check_drafted,
    drafts_pay,
)


class Engine:
    """Steps of an engine on a clock of its own: with drafts a sequence gets 2 tokens, and a step lasts longer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.drafted_s, self.plain_s = 1.5, 1.0
        self.switch = DraftSwitch(clock=lambda: self.now)
        self.drafted: list[bool] = []

    def step(self, running: int = 4, *, decodes: bool = True, pause_s: float = 0.0) -> bool:
        """Whether it had drafts."""
        drafting = self.switch.drafting
        self.switch.begin(running, decodes=decodes)
        self.now += (self.drafted_s if drafting else self.plain_s) + pause_s
        self.switch.end(running * (2 if drafting else 1))
        return drafting

    def settled(self, running: int = 4) -> bool:
        """What it does once both kinds have been measured."""
        for _ in range(3 * WINDOW_STEPS):
            self.step(running)
        return self.step(running)


def steps(tokens: int, seconds: float) -> list[StepSpeed]:
    return [StepSpeed(tokens, seconds)] * 3


def test_drafts_pay_where_tokens_come_no_slower():
    assert drafts_pay(steps(8, 1.5), steps(4, 1.0))
    assert drafts_pay(steps(8, 2.0), steps(4, 1.0))
    assert not drafts_pay(steps(8, 2.1), steps(4, 1.0))
    assert drafts_pay([*steps(8, 1.5), StepSpeed(8, 900.0)], steps(4, 1.0)), "a pause is nobody's fault"


def test_both_kinds_are_measured_and_the_faster_one_stays():
    engine = Engine()
    assert {engine.step() for _ in range(WINDOW_STEPS)} == {True}
    assert {engine.step() for _ in range(WINDOW_STEPS + 4)} == {True, False}
    assert engine.settled()
    engine = Engine()
    engine.drafted_s = 2.5
    assert not engine.settled()
    assert {engine.step() for _ in range(100)} == {False}


def test_each_size_of_the_batch_is_measured_by_itself():
    engine = Engine()
    assert engine.settled(running=4)
    engine.drafted_s = 4.0
    assert not engine.settled(running=64)
    engine.drafted_s = 1.5
    engine.step(running=4)
    assert engine.step(running=4), "what was found for few sequences holds"


def test_it_is_measured_anew_after_a_while():
    engine = Engine()
    engine.drafted_s = 2.5
    assert not engine.settled()
    engine.drafted_s = 1.5  # the policy has become easier to guess
    for _ in range(KEPT_STEPS + 3 * WINDOW_STEPS):
        engine.step()
    assert engine.step()


def test_prompts_and_pauses_are_not_measured():
    engine = Engine()
    for number in range(4 * WINDOW_STEPS):
        engine.step(pause_s=900.0 if number % 8 == 0 else 0.0)
        engine.now += 50.0 if engine.step(decodes=False) else 0.0
    assert engine.step()


class FakeWorker:
    """As vLLM's: what it is told to compute, and then the proposal of drafts for the step after."""

    def __init__(self) -> None:
        self.proposed = 0
        self.model_runner = SimpleNamespace(propose_draft_token_ids=self._propose)
        self.executed: list[Any] = []

    def execute_model(self, scheduled: Any) -> str:
        self.executed.append(scheduled)
        return "executed"

    def _propose(self, scheduled: Any, sampled: list[list[int]], metadata: Any, *, slots: Any) -> list[list[int]]:
        self.proposed += 1
        return [[1, 2] for _ in sampled]


def scheduled(drafts: dict[str, list[int]], *, names: tuple[str, ...] = ("a", "b")) -> SimpleNamespace:
    counts = {name: 1 + len(drafts.get(name, ())) for name in names}
    return SimpleNamespace(num_scheduled_tokens=counts, scheduled_spec_decode_tokens=drafts, scheduled_new_reqs=[])


def test_a_worker_whose_drafts_do_not_pay_makes_none():
    worker, now = FakeWorker(), [0.0]
    WorkerDrafts(worker, DraftSwitch(clock=lambda: now[0]))
    drafts: dict[str, list[int]] = {}
    for _ in range(4 * WINDOW_STEPS):
        assert worker.execute_model(scheduled(drafts)) == "executed"
        now[0] += 3.0 if drafts else 1.0  # and no guess is ever right
        proposals = worker.model_runner.propose_draft_token_ids(None, [[7], [8]], None, slots=None)
        drafts = {name: found for name, found in zip("ab", proposals, strict=True) if found}
    assert drafts == {} and proposals == [[], []]
    assert WINDOW_STEPS <= worker.proposed <= WINDOW_STEPS + 2


def test_a_step_without_tokens_is_none():
    worker, now = FakeWorker(), [0.0]
    switch = DraftSwitch(clock=lambda: now[0])
    WorkerDrafts(worker, switch)
    worker.execute_model(scheduled({}, names=()))
    assert switch._sizes == {}


def test_tokens_that_come_with_other_logprobs_than_the_models_are_refused():
    check_drafted([-1.0, -2.0], [-1.01, -2.2], kind="vllm")
    for wrong in ([-4.6, -4.6], [float("nan"), -2.0]):
        with pytest.raises(Refused, match="with speculative decoding vllm samples from another policy"):
            check_drafted(wrong, [-1.0, -2.0], kind="vllm")
