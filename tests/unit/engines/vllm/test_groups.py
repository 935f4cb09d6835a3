from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.common.errors import EngineError
from lachesis.engines.vllm.groups import Group, Member, missing_parts


@dataclass
class Params:
    """As vLLM's ``SamplingParams``."""

    seed: int | None = None
    extra_args: dict[str, Any] | None = None


@dataclass
class Request:
    """As vLLM's ``EngineCoreRequest``."""

    request_id: str
    prompt: Any
    sampling_params: Params
    lora_request: Any
    external_req_id: str | None = None


@dataclass
class FakeEngine:
    """As vLLM's ``AsyncLLM``: refuses a name that it has, answers as ``end`` is told, forgets what is aborted."""

    read: int = 0
    sent: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    collectors: dict[str, Any] = field(default_factory=dict)
    handles_outputs: bool = False
    errored: bool = False
    log_requests: bool = False
    dies_after: int | None = None

    def __post_init__(self) -> None:
        self.input_processor = SimpleNamespace(process_inputs=self._process, assign_request_id=self._assign)
        self.output_processor = SimpleNamespace(add_request=self._expect)
        self.engine_core = SimpleNamespace(add_request_async=self._send)

    @property
    def dead_error(self) -> Exception:
        return RuntimeError("the engine is dead")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _process(self, name: str, prompt: Any, params: Params, *, supported_tasks: Any, lora_request: Any) -> Request:
        assert supported_tasks == ("generate",)
        self.read += 1
        return Request(name, prompt, params, lora_request)

    def _assign(self, request: Request) -> None:
        assert request.external_req_id is None, "vLLM names a request once"
        request.external_req_id, request.request_id = request.request_id, f"{request.request_id}-x"

    def _run_output_handler(self) -> None:
        self.handles_outputs = True

    def _expect(self, request: Request, text: None, parent: None, index: int, collector: Any) -> None:
        assert request.request_id not in self.collectors
        self.collectors[request.request_id] = collector

    async def _send(self, request: Request) -> None:
        assert self.handles_outputs and request.request_id in self.collectors
        if self.dies_after == len(self.sent):
            raise self.dead_error
        self.sent.append(request)

    async def abort(self, names: Sequence[str], *, internal: bool) -> None:
        assert internal
        for name in [name for name in names if name in self.collectors]:
            self.aborted.append(name)
            self.end(name, reason="abort")  # vLLM tells who waits

    def end(self, name: str, *, tokens: Sequence[int] = (), reason: str = "stop") -> None:
        self.collectors.pop(name).put(
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason)])
        )


MEMBERS = [Member(f"g-{i}", 5 + i, {"key": f"k{i}"}) for i in range(3)]


def run(engine: FakeEngine, play: Callable[[asyncio.Task[Any]], None]) -> tuple[list[Any], list[int]]:
    """The outputs of a group of three of which ``play`` decides once it is under way, and the order of their ends."""
    order: list[int] = []

    async def all_of_it() -> list[Any]:
        group = Group(engine, ended=lambda place, output: order.append(place))
        task = asyncio.ensure_future(group.run("prompt", Params(9, {"of": "all"}), MEMBERS, lora_request="lora"))
        await asyncio.sleep(0)
        play(task)
        return await task

    return asyncio.run(all_of_it()), order


def test_a_prompt_is_read_once_and_each_of_its_sequences_is_a_request_of_its_own():
    engine = FakeEngine()

    def play(task: Any) -> None:
        for name, token in (("g-1-x", 1), ("g-0-x", 0), ("g-2-x", 2)):
            assert not task.done()
            engine.end(name, tokens=[token])

    outputs, order = run(engine, play)
    assert [output.outputs[0].token_ids for output in outputs] == [[0], [1], [2]]
    assert order == [1, 0, 2], "each is handed on when it ends"
    assert engine.read == 1
    assert [request.external_req_id for request in engine.sent] == ["g-0", "g-1", "g-2"]
    assert [request.sampling_params for request in engine.sent] == [
        Params(5 + i, {"of": "all", "key": f"k{i}"}) for i in range(3)
    ]
    assert {request.lora_request for request in engine.sent} == {"lora"}
    assert engine.aborted == []


def test_a_caller_that_goes_away_has_aborted_what_is_in_flight():
    engine = FakeEngine()

    def play(task: asyncio.Task[Any]) -> None:
        engine.end("g-1-x")
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        run(engine, play)
    assert engine.aborted == ["g-0-x", "g-2-x"]


def test_a_sequence_that_fails_ends_its_group():
    engine = FakeEngine()
    with pytest.raises(EngineError, match="failed to compute"):
        run(engine, lambda task: engine.end("g-1-x", reason="error"))
    assert engine.aborted == ["g-0-x", "g-2-x"]


def test_the_error_of_an_engine_that_dies_is_raised_as_it_is():
    engine = FakeEngine()

    def play(task: Any) -> None:
        engine.errored = True
        for collector in engine.collectors.values():
            collector.put(engine.dead_error)

    with pytest.raises(RuntimeError, match="the engine is dead"):
        run(engine, play)
    assert engine.aborted == [], "a dead engine takes no message"


def test_an_engine_that_dies_while_it_gets_them_leaves_none_in_flight():
    engine = FakeEngine(dies_after=1)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        run(engine, lambda task: None)
    assert engine.aborted == ["g-0-x", "g-1-x", "g-2-x"]
    assert engine.collectors == {}


def test_an_engine_without_a_part_is_named():
    engine = FakeEngine()
    assert missing_parts(engine) == []
    del engine.engine_core.add_request_async
    assert missing_parts(engine) == ["engine_core.add_request_async"]
