from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from lachesis.common.errors import EngineError
from lachesis.engines.vllm import logprobs as module
from lachesis.engines.vllm.logprobs import KEY, FetchedLogprobs, WorkerLogprobs


class Rows(NamedTuple):
    logprobs: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class Output:
    """As vLLM's ``ModelRunnerOutput``."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: Rows | None


@dataclass
class FakeWorker:
    """Samples what it is told to, one token a request; ``later`` answers as asynchronous scheduling does."""

    later: bool = False
    next: Output | None = None
    seen: list[Any] = field(default_factory=list)

    def execute_model(self, scheduled: Any) -> None:
        self.seen.append(scheduled)

    def sample_tokens(self, grammar: Any) -> Any:
        output = self.next
        return SimpleNamespace(get_output=lambda: output) if self.later else output


class Engine:
    """Steps of vLLM over a fake worker: requests by name, with the tokens computed so far."""

    def __init__(self, *, later: bool = False) -> None:
        self.worker = FakeWorker(later=later)
        self.kept = WorkerLogprobs(self.worker)
        self.computed: dict[str, int] = {}
        self.finished: set[str] = set()

    def step(self, sampled: dict[str, tuple[int, float] | None], new: dict[str, tuple[int, str | None]] | None = None):
        """One step: ``new`` requests by prompt length and key; what each request samples, None while it prefills."""
        new = new or {}
        started = [
            SimpleNamespace(
                req_id=name,
                num_computed_tokens=0,
                sampling_params=SimpleNamespace(extra_args=None if key is None else {KEY: key}),
            )
            for name, (_, key) in new.items()
        ]
        cached = [name for name in sampled if name not in new]
        counts = {name: new[name][0] if name in new else 1 for name in sampled}
        scheduled = SimpleNamespace(
            finished_req_ids=self.finished,
            scheduled_new_reqs=started,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, num_computed_tokens=[self.computed[name] for name in cached]
            ),
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens={},
        )
        self.finished = set()
        for name in sampled:
            self.computed[name] = self.computed.get(name, 0) + counts[name]
        rows = np.array([[value[1] if value else 0.0] for value in sampled.values()], dtype=np.float32)
        tokens = [[value[0]] if value else [] for value in sampled.values()]
        self.worker.next = Output(list(sampled), tokens, Rows(rows))
        assert self.worker.execute_model(scheduled) is None
        output = self.worker.sample_tokens(None)
        return output.get_output if self.worker.later else output

    def fetched(self) -> FetchedLogprobs:
        async def fetch(asked: Any, dropped: Any) -> Any:
            return self.kept.take(asked, dropped)

        return FetchedLogprobs(fetch)

    def take(self, key: str, prompt_length: int, token_ids: list[int]) -> tuple[float, ...]:
        return asyncio.run(self.fetched().take(key, prompt_length=prompt_length, token_ids=token_ids))


def test_those_of_a_sequence_come_once_it_has_ended():
    engine = Engine()
    engine.step({"r": (7, -0.5)}, new={"r": (3, "a")})
    output = engine.step({"r": (8, -0.25)})
    assert output.logprobs is None, "nothing travels with the tokens"
    assert engine.take("a", 3, [7, 8]) == (-0.5, -0.25)
    with pytest.raises(EngineError, match="has not kept 2 of the 2"):
        engine.take("a", 3, [7, 8])


def test_a_prompt_in_pieces_has_no_token():
    engine = Engine()
    engine.step({"r": None}, new={"r": (3, "a")})
    engine.step({"r": (8, -0.25)})
    assert engine.take("a", 4, [8]) == (-0.25,)


def test_a_token_that_is_dropped_and_sampled_anew_counts_once():
    """As where vLLM preempts a request whose last token is still being computed."""
    engine = Engine()
    engine.step({"r": (7, -0.5)}, new={"r": (3, "a")})
    engine.step({"r": (8, -0.25)})
    engine.computed["r"] = 3
    engine.step({"r": (9, -0.75)})
    engine.step({"r": (5, -1.0)})
    assert engine.take("a", 3, [7, 9, 5]) == (-0.5, -0.75, -1.0)


@pytest.mark.parametrize("key", [None, "other"])
def test_another_requests_logprobs_travel(key: str | None):
    engine = Engine()
    engine.step({"r": (7, -0.5), "s": (1, -3.0)}, new={"r": (3, "a"), "s": (2, key)})
    output = engine.step({"r": (8, -0.25), "s": (2, -4.0)})
    assert (output.logprobs is None) == (key is not None)
    assert engine.take("a", 3, [7, 8]) == (-0.5, -0.25)


def test_other_tokens_than_answered_are_an_error():
    engine = Engine()
    engine.step({"r": (7, -0.5)}, new={"r": (3, "a")})
    with pytest.raises(EngineError, match="other tokens"):
        engine.take("a", 3, [6])


def test_what_nobody_fetches_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MOST_UNFETCHED", 2)
    engine = Engine()
    for i in range(6):
        engine.step({f"r{i}": (7, -0.5)}, new={f"r{i}": (3, f"k{i}")})
        engine.finished = {f"r{i}"}
    engine.step({"last": (7, -0.5)}, new={"last": (3, "last")})
    assert sorted(engine.kept._kept) == ["k3", "k4", "k5", "last"]
    engine.kept.take({}, ["k3", "k4"])
    assert sorted(engine.kept._kept) == ["k5", "last"]


def test_all_that_end_together_are_fetched_at_once():
    calls: list[tuple[list[str], list[str]]] = []
    engine = Engine()
    engine.step({"r": (7, -0.5), "s": (1, -1.0)}, new={"r": (3, "a"), "s": (3, "b")})

    async def fetch(asked: Any, dropped: Any) -> Any:
        calls.append((sorted(asked), list(dropped)))
        return engine.kept.take(asked, dropped)

    async def both() -> tuple[tuple[float, ...], tuple[float, ...]]:
        fetched = FetchedLogprobs(fetch)
        fetched.drop("c")
        return await asyncio.gather(
            fetched.take("a", prompt_length=3, token_ids=[7]), fetched.take("b", prompt_length=3, token_ids=[1])
        )

    assert list(asyncio.run(both())) == [(-0.5,), (-1.0,)]
    assert calls == [(["a", "b"], ["c"])]


def test_what_was_asked_for_and_is_not_wanted_any_more_is_forgotten():
    engine = Engine()
    engine.step({"r": (7, -0.5), "s": (1, -1.0)}, new={"r": (3, "a"), "s": (3, "b")})

    async def one_of_two() -> tuple[float, ...]:
        fetched = engine.fetched()
        fetched.ask("a", prompt_length=3, token_ids=[7])
        fetched.drop("a")
        return await fetched.take("b", prompt_length=3, token_ids=[1])

    assert asyncio.run(one_of_two()) == (-1.0,)
    with pytest.raises(EngineError, match="has not kept"):
        engine.take("a", 3, [7])


def test_a_failed_call_is_the_error_of_all_who_asked():
    async def fetch(asked: Any, dropped: Any) -> Any:
        raise EngineError("vLLM's engine is dead")

    async def both() -> list[Any]:
        fetched = FetchedLogprobs(fetch)
        work = [fetched.take(key, prompt_length=3, token_ids=[7]) for key in "ab"]
        return await asyncio.gather(*work, return_exceptions=True)

    assert [str(error) for error in asyncio.run(both())] == ["vLLM's engine is dead"] * 2


def test_no_token_needs_no_call():
    assert Engine().take("a", 3, []) == ()
