"""Pausing and making room between two tokens of what the embedded engine generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.embedded.gate import EnginePaused
from tests.tiny import PAD_ID, tiny_model
from tests.waiting import LONG_S, LateDeadline

REQUEST = GenerationRequest((5, 6), SamplingParams(8, stop=("x",)), seed=1)


class Gate:
    """A decoder of text that holds generation inside its third token until it is opened."""

    def __init__(self) -> None:
        self.calls = 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, ids: Sequence[int]) -> str:
        self.calls += 1
        if self.calls == 3:
            self.reached.set()
            assert self.opened.wait(LONG_S)
        return ""


def make(decode: Callable[[Sequence[int]], str]) -> EmbeddedEngine:
    return EmbeddedEngine(
        tiny_model("qwen2").train(), eos_token_ids=[], pad_token_id=PAD_ID, max_batch_size=8, max_context=64,
        decode=decode,
    )  # fmt: skip


def soon(seconds: float = LONG_S) -> Deadline:
    return Deadline("test: generation", seconds)


def beside(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def target() -> None:
        try:
            outcome.append(call())
        except (EngineError, DeadlineExceeded) as error:
            outcome.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, outcome


def held() -> tuple[EmbeddedEngine, Gate, threading.Thread, list[object]]:
    """An engine paused by ``keep`` at the third token of a call."""
    gate = Gate()
    engine = make(gate)
    generating, outcome = beside(lambda: engine.generate([REQUEST], deadline=soon()))
    assert gate.reached.wait(LONG_S)
    pausing, _ = beside(lambda: engine.pause(mode="keep"))
    pausing.join(0.05)
    assert pausing.is_alive(), "the token is not done, its weights must not change"
    gate.opened.set()
    pausing.join(LONG_S)
    assert not pausing.is_alive() and not outcome
    return engine, gate, generating, outcome


def test_keep_holds_a_call_between_tokens_until_it_is_resumed():
    ((undisturbed,),) = make(lambda ids: "").generate([REQUEST], deadline=soon())
    engine, gate, generating, outcome = held()
    generating.join(0.05)
    assert gate.calls == 3 and generating.is_alive()
    with pytest.raises(EnginePaused):
        engine.generate([REQUEST], deadline=soon())
    assert len(engine.canary([5, 6, 7]).logprobs) == 2
    engine.set_version(9)
    engine.resume()
    generating.join(LONG_S)
    (((completion,),),) = outcome
    assert completion.token_ids == undisturbed.token_ids
    assert completion.versions == (0, 9) and completion.finish_reason == "length"


def test_held_calls_go_on_under_the_new_weights_and_leave_the_model_in_its_mode():
    engine, _, generating, outcome = held()
    with engine.exclusive() as model:
        assert model.training, "between tokens the model is the trainer's"
        with torch.no_grad():
            model.get_parameter("model.norm.weight").mul_(-3)
    engine.resume()
    generating.join(LONG_S)
    (((completion,),),) = outcome
    ((undisturbed,),) = make(lambda ids: "").generate([REQUEST], deadline=soon())
    assert completion.token_ids[:3] == undisturbed.token_ids[:3]
    assert completion.logprobs[:3] == undisturbed.logprobs[:3]
    assert completion.logprobs[3] != undisturbed.logprobs[3]
    assert model.training


@pytest.mark.parametrize(("mode", "tokens", "reason"), [("drain", 8, "length"), ("abort", 3, "abort")])
def test_what_is_held_can_be_drained_or_aborted(mode, tokens, reason):
    engine, _, generating, outcome = held()
    engine.pause(mode=mode)
    generating.join(LONG_S)
    (((completion,),),) = outcome
    assert (len(completion.token_ids), completion.finish_reason) == (tokens, reason)
    assert engine.health().paused


def test_closing_ends_what_is_held():
    engine, _, generating, outcome = held()
    engine.close()
    generating.join(LONG_S)
    assert isinstance(outcome[0], EngineError) and "closed during generation" in str(outcome[0])


def test_being_held_counts_against_the_deadline():
    gate = Gate()
    engine = make(gate)
    deadline = LateDeadline("test: generation", 0.2, begun=gate.reached.is_set)
    generating, outcome = beside(lambda: engine.generate([REQUEST], deadline=deadline))
    assert gate.reached.wait(LONG_S)
    beside(lambda: engine.pause(mode="keep"))
    gate.opened.set()
    generating.join(LONG_S)
    assert isinstance(outcome[0], DeadlineExceeded)


def test_a_pause_is_over_when_it_is_resumed_before_the_call_came_to_rest():
    gate = Gate()
    engine = make(gate)
    generating, outcome = beside(lambda: engine.generate([REQUEST], deadline=soon()))
    assert gate.reached.wait(LONG_S)
    pausing, _ = beside(lambda: engine.pause(mode="drain"))
    pausing.join(0.05)
    engine.resume()
    pausing.join(LONG_S)
    assert not pausing.is_alive() and generating.is_alive()
    gate.opened.set()
    generating.join(LONG_S)
    assert len(outcome[0][0][0].token_ids) == 8


def test_guests_get_the_model_between_two_tokens_without_a_pause():
    gate = Gate()
    engine = make(gate)
    generating, outcome = beside(lambda: engine.generate([REQUEST], deadline=soon()))
    assert gate.reached.wait(LONG_S)
    calls_seen: list[int] = []

    def visit() -> None:
        with engine.exclusive():
            calls_seen.append(gate.calls)

    visiting, _ = beside(visit)
    visiting.join(0.05)
    assert visiting.is_alive()
    gate.opened.set()
    visiting.join(LONG_S)
    generating.join(LONG_S)
    assert calls_seen == [3] and len(outcome[0][0][0].token_ids) == 8


def test_pausing_from_inside_a_call_does_not_wait_for_it():
    engine = make(lambda ids: pause(len(ids)))

    def pause(length: int) -> str:
        if length == 4:
            engine.pause(mode="abort")
        return ""

    ((completion,),) = engine.generate([REQUEST], deadline=soon())
    assert (len(completion.token_ids), completion.finish_reason) == (4, "abort")


def test_a_listener_follows_the_call_and_gives_requests_up():
    engine = make(lambda ids: "")
    steps = []

    def listen(step):
        steps.append(step)
        return [1] if len(steps) == 2 else []

    requests = [GenerationRequest((5, 6), SamplingParams(4), n=2, seed=1), GenerationRequest((7,), SamplingParams(4))]
    kept, given_up = engine.generate(requests, deadline=soon(), listener=listen, top_logprobs=3)
    for index, completion in enumerate(kept):
        rows = [
            (s, i) for s in steps for i in range(s.requests.size) if (s.requests[i], s.completions[i]) == (0, index)
        ]
        assert tuple(int(s.token_ids[i]) for s, i in rows) == completion.token_ids
        assert [s.reasons[i] for s, i in rows] == [None, None, None, "length"]
        for s, i in rows:
            assert s.top_ids[i].size == 3 and s.top_logprobs[i][0] >= s.logprobs[i]
    assert (len(given_up[0].token_ids), given_up[0].finish_reason) == (2, "abort")
    assert [s.requests.tolist() for s in steps[2:]] == [[0, 0], [0, 0]]
