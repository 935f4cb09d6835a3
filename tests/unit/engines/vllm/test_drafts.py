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
    tokens_per_second,
)


class Engine:
    """Steps of an engine on a clock of its own: with drafts a sequence gets 2 tokens, and a step lasts longer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.drafted_s, self.plain_s = 1.5, 1.0
        self.switch = DraftSwitch(clock=lambda: self.now)

    def step(self, running: int = 4, *, decodes: bool = True, pause_s: float = 0.0) -> bool:
        """Whether it had drafts."""
        drafted = self.switch.drafting
        self.switch.begin(running, decodes=decodes)
        self.now += (self.drafted_s if drafted else self.plain_s) + pause_s
        self.switch.end(running * (2 if drafted else 1))
        return drafted

    def settled(self, running: int = 4) -> bool:
        """What it does once both kinds have been measured."""
        for _ in range(3 * WINDOW_STEPS):
            self.step(running)
        return self.step(running)

    def measured_anew(self, running: int = 4) -> bool:
        """The same, once what was found has been kept for as long as it is."""
        for _ in range(KEPT_STEPS):
            self.step(running)
        return self.settled(running)


def steps(tokens: int, seconds: float) -> list[StepSpeed]:
    return [StepSpeed(tokens, seconds)] * 3


def test_a_pause_between_two_steps_is_nobodys_fault():
    assert tokens_per_second([*steps(8, 2.0), StepSpeed(8, 900.0)]) == 4.0


@pytest.mark.parametrize(
    ("drafted", "plain", "now", "then"),
    [
        (100.0, 200.0, True, False),
        (200.0, 100.0, False, True),
        (100.0, 102.0, True, True),  # a difference that a second measurement may have as well
        (102.0, 100.0, False, False),
        (100.0, 104.0, True, False),
        (104.0, 100.0, False, True),
    ],
)
def test_what_is_done_now_stays_unless_the_other_is_clearly_faster(drafted: float, plain: float, now: bool, then: bool):
    assert drafts_pay(drafted=drafted, plain=plain, drafting=now) is then


def test_both_kinds_are_measured_and_the_faster_one_stays():
    engine = Engine()
    assert {engine.step() for _ in range(WINDOW_STEPS)} == {True}
    assert {engine.step() for _ in range(WINDOW_STEPS + 4)} == {True, False}
    assert engine.settled()
    engine = Engine()
    engine.drafted_s = 2.5
    assert not engine.settled()
    assert {engine.step() for _ in range(100)} == {False}


def test_what_is_almost_equal_flips_neither_way():
    engine = Engine()
    engine.drafted_s = 2.04
    assert engine.settled()
    engine.drafted_s = 2.5
    assert not engine.measured_anew()
    engine.drafted_s = 1.96
    assert not engine.measured_anew()
    engine.drafted_s = 1.5
    assert engine.measured_anew()


def test_it_reports_steps_and_the_latest_verdict_of_each_size():
    engine = Engine()
    engine.settled(running=4)
    engine.drafted_s = 4.0
    engine.settled(running=64)
    report = engine.switch.report()
    few, many = report["verdicts"]
    assert few == {"sequences": 4, "drafting": True, "drafted": pytest.approx(8 / 1.5), "plain": 4.0}
    assert many == {"sequences": 64, "drafting": False, "drafted": 32.0, "plain": 64.0}
    assert report["steps"] == 2 * (3 * WINDOW_STEPS + 1) > report["drafted_steps"] > 0
    engine.drafted_s = 2.5
    engine.measured_anew(running=4)
    assert [verdict["sequences"] for verdict in engine.switch.report()["verdicts"]] == [64, 4]


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
    """As vLLM's: it executes, samples and proposes drafts for the step after, which its engine then asks for."""

    def __init__(self, *, second_runner: bool = False) -> None:
        self.proposed = 0
        self.drafts: list[list[int]] = []
        self.second_runner = second_runner
        self.model_runner = SimpleNamespace()
        if not second_runner:
            self.model_runner.propose_draft_token_ids = self._propose

    def execute_model(self, scheduled: Any) -> str:
        return "executed"

    def sample_tokens(self, grammar: Any) -> Any:
        sampled = [[7], [8]]
        propose = self._propose if self.second_runner else self.model_runner.propose_draft_token_ids
        self.drafts = propose(None, sampled, None, slots=None)
        return SimpleNamespace(sampled_token_ids=sampled)

    def take_draft_token_ids(self) -> Any:
        return SimpleNamespace(req_ids=["a", "b"], draft_token_ids=self.drafts)

    def _propose(self, scheduled: Any, sampled: list[list[int]], metadata: Any, *, slots: Any) -> list[list[int]]:
        self.proposed += 1
        return [[1, 2] for _ in sampled]


def scheduled(drafts: dict[str, list[int]], *, names: tuple[str, ...] = ("a", "b")) -> SimpleNamespace:
    counts = {name: 1 + len(drafts.get(name, ())) for name in names}
    return SimpleNamespace(num_scheduled_tokens=counts, scheduled_spec_decode_tokens=drafts, scheduled_new_reqs=[])


def run(worker: FakeWorker, *, steps: int, clock: list[float]) -> list[bool]:
    """Whether each step had drafts, which take three times as long to verify, and of which none is ever right."""
    drafts: dict[str, list[int]] = {}
    had: list[bool] = []
    for _ in range(steps):
        assert worker.execute_model(scheduled(drafts)) == "executed"
        clock[0] += 3.0 if drafts else 1.0
        assert worker.sample_tokens(None).sampled_token_ids == [[7], [8]]
        taken = worker.take_draft_token_ids()
        had.append(bool(drafts))
        drafts = {} if taken is None else dict(zip(taken.req_ids, taken.draft_token_ids, strict=True))
    return had


@pytest.mark.parametrize("kind", ["first runner", "second runner", "with a memory"])
def test_a_worker_whose_drafts_do_not_pay_hands_none_out(kind: str):
    worker, now = FakeWorker(second_runner=kind == "second runner"), [0.0]
    drafts = WorkerDrafts(worker, forgetful=kind != "with a memory", switch=DraftSwitch(clock=lambda: now[0]))
    had = run(worker, steps=4 * WINDOW_STEPS, clock=now)
    assert WINDOW_STEPS <= sum(had) <= WINDOW_STEPS + 2 and not any(had[-WINDOW_STEPS:])
    assert drafts.switch.report()["verdicts"] == [{"sequences": 2, "drafting": False, "drafted": 2 / 3, "plain": 2.0}]
    if kind == "first runner":
        assert WINDOW_STEPS <= worker.proposed <= WINDOW_STEPS + 2, "none is looked for either"
    else:
        assert worker.proposed == len(had)


def test_a_step_without_tokens_is_none():
    worker, now = FakeWorker(), [0.0]
    drafts = WorkerDrafts(worker, forgetful=True, switch=DraftSwitch(clock=lambda: now[0]))
    worker.execute_model(scheduled({}, names=()))
    assert drafts.switch.report() == {"steps": 0, "drafted_steps": 0, "verdicts": []}


def test_tokens_that_come_with_other_logprobs_than_the_models_are_refused():
    check_drafted([-1.0, -2.0], [-1.01, -2.2], kind="vllm")
    for wrong in ([-4.6, -4.6], [float("nan"), -2.0]):
        with pytest.raises(Refused, match="with speculative decoding vllm samples from another policy"):
            check_drafted(wrong, [-1.0, -2.0], kind="vllm")
