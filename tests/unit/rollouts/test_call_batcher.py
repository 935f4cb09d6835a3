"""Single turns put together into calls of an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError
from lachesis.common.types import Completion, GenerationRequest, SamplingParams, VersionSpan
from lachesis.rollouts.call_batcher import CallBatcher


class FakeEngine:
    """Answers each prompt with its own tokens; ``failures`` are raised first, one a call."""

    def __init__(self, *failures: Exception, paused: bool = False) -> None:
        self.sizes: list[int] = []
        self.failures = list(failures)
        self.paused = paused

    def generate(self, requests: Any, *, deadline: Deadline, finished: Any) -> None:
        deadline.check("nothing was sent")
        if self.failures:
            raise self.failures.pop(0)
        self.sizes.append(len(requests))
        for place, request in enumerate(requests):
            ids = request.prompt_ids
            finished(place, [Completion(ids, (-1.0,) * len(ids), "stop", VersionSpan(0, 0))])

    def health(self) -> Any:
        return SimpleNamespace(paused=self.paused)


def completed(engine: FakeEngine, *, count: int = 5, deadline: Deadline | None = None) -> list[Any]:
    async def ask() -> list[Any]:
        calls = CallBatcher(engine, at_once=1)  # type: ignore[arg-type]
        calls.deadline = deadline or calls.deadline
        requests = [GenerationRequest((number,), SamplingParams(4)) for number in range(count)]
        answers = await asyncio.gather(*(calls.complete(one) for one in requests), return_exceptions=True)
        await calls.stop()
        return list(answers)

    return asyncio.run(ask())


def test_what_is_asked_for_together_is_one_call():
    engine = FakeEngine()
    assert [one.token_ids for one in completed(engine)] == [(0,), (1,), (2,), (3,), (4,)]
    assert engine.sizes == [5]


@pytest.mark.parametrize(
    "failure", [EngineError("gone"), RuntimeError("out of memory")], ids=lambda one: type(one).__name__
)
def test_all_who_wait_hear_of_a_failure(failure: Exception):
    assert completed(FakeEngine(failure)) == [failure] * 5


def test_an_engine_that_is_paused_is_asked_again():
    engine = FakeEngine(EngineError("paused"), EngineError("paused"), paused=True)
    assert len(completed(engine)) == 5
    assert engine.sizes == [5]


def test_a_pause_has_the_deadline_of_the_calls():
    engine = FakeEngine(*[EngineError("paused")] * 100, paused=True)
    answers = completed(engine, deadline=Deadline("turns", 0.1))
    assert {type(one) for one in answers} == {DeadlineExceeded}


def test_a_closed_one_begins_no_call():
    async def ask() -> None:
        calls = CallBatcher(FakeEngine(), at_once=1)  # type: ignore[arg-type]
        await calls.stop()
        with pytest.raises(RuntimeError, match="shutdown"):
            await calls.complete(GenerationRequest((1,), SamplingParams(4)))

    asyncio.run(ask())
