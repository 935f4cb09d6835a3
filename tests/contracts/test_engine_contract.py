"""What every engine owes to its callers. An engine joins by adding a factory to ``ENGINES``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.engines.base import Engine
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.http.client import HttpEngine
from tests.contracts.bridge_cases import reset
from tests.contracts.servers import MAX_LEN, TOKEN, Server
from tests.contracts.vllm_server import needs_vllm
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer

MAX_CONTEXT = MAX_LEN
PROMPT, OTHER = (15, 16, 17, 18), (40, 41)


@dataclass(frozen=True, slots=True)
class Factory:
    """How to make an engine that serves a tiny Qwen2 model, and how far its logprobs may be off, in nats.

    ``servers`` are the fixtures that it needs, ``other`` those of an engine beside it. ``waits`` says that a call
    waits where the engine is paused, instead of being refused.
    """

    name: str
    build: Callable[[list[Server]], Engine]
    servers: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    waits: bool = False
    tolerance: float = 1e-3


def build_embedded(servers: list[Server]) -> Engine:
    return EmbeddedEngine(
        tiny_model("qwen2"),
        eos_token_ids=[EOS_ID],
        pad_token_id=PAD_ID,
        max_batch_size=8,
        max_context=MAX_CONTEXT,
        decode=tiny_tokenizer().decode,
    )


def build_client(servers: list[Server]) -> Engine:
    return HttpEngine([str(server.http.base_url) for server in servers], token=TOKEN)


FIRST, SECOND, VLLM = "embedded_server", "second_embedded_server", "vllm_server"
ENGINES = [
    Factory("embedded", build_embedded),
    Factory("embedded server", build_client, (FIRST,), (SECOND,), waits=True),
    Factory("two embedded servers", build_client, (FIRST, SECOND), (FIRST,), waits=True),
    pytest.param(
        Factory("vllm", build_client, (VLLM,), (FIRST,), waits=True), marks=[needs_vllm, pytest.mark.timeout(600)]
    ),
]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda factory: factory.name)
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param


@pytest.fixture
def engine(factory: Factory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    servers: list[Server] = [request.getfixturevalue(name) for name in factory.servers]
    for server in servers:
        reset(server)
    built = factory.build(servers)
    yield built
    built.close()
    for server in servers:
        server.post("/bridge/resume")


def soon() -> Deadline:
    return Deadline("contract: generation", 120.0)


def generate(engine: Engine, *requests: GenerationRequest) -> list[list[Completion]]:
    return engine.generate(requests, deadline=soon())


def test_results_come_in_the_order_of_requests_with_n_each(engine):
    params = SamplingParams(5)
    results = generate(
        engine,
        GenerationRequest(PROMPT, params, n=3, seed=1),
        GenerationRequest(OTHER, params, n=1, seed=2),
        GenerationRequest(PROMPT, params, n=9, seed=3),
    )
    assert [len(group) for group in results] == [3, 1, 9]
    alone = generate(engine, GenerationRequest(OTHER, params, n=1, seed=2))
    assert results[1][0].token_ids == alone[0][0].token_ids


def test_no_requests_give_no_results(engine):
    assert generate(engine) == []


def test_each_request_is_told_of_once_with_what_is_returned(engine):
    told: dict[int, list[list[Completion]]] = {}
    requests = [GenerationRequest(PROMPT, SamplingParams(limit), n=n, seed=n) for limit, n in ((6, 1), (2, 9), (4, 3))]
    results = engine.generate(
        requests, deadline=soon(), finished=lambda index, answer: told.setdefault(index, []).append(answer)
    )
    assert told == {index: [answer] for index, answer in enumerate(results)}


def test_completions_are_whole(engine):
    engine.set_version(3)
    requests = [GenerationRequest(PROMPT, SamplingParams(limit), n=4, seed=limit) for limit in (1, 6)]
    for request, group in zip(requests, generate(engine, *requests), strict=True):
        for completion in group:
            assert 1 <= len(completion.token_ids) <= request.params.max_tokens
            assert len(completion.logprobs) == len(completion.token_ids)
            assert all(math.isfinite(value) and value <= 0 for value in completion.logprobs)
            ended = completion.token_ids[-1] == EOS_ID
            assert completion.finish_reason == ("stop" if ended else "length")
            assert completion.versions == (3, 3)


def test_equal_seeds_give_equal_completions(engine):
    request = GenerationRequest(PROMPT, SamplingParams(8, temperature=0.8, top_p=0.9), n=4, seed=11)
    (first,), (second, _) = (
        generate(engine, request),
        generate(engine, request, GenerationRequest(OTHER, SamplingParams(8))),
    )
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    other = generate(engine, GenerationRequest(PROMPT, request.params, n=4, seed=12))[0]
    assert [c.token_ids for c in other] != [c.token_ids for c in first]


def test_the_canary_agrees_with_the_logprobs_of_generation(engine, factory):
    for temperature in (1.0, 0.0):
        request = GenerationRequest(PROMPT, SamplingParams(6, temperature=temperature), seed=4)
        ((completion,),) = generate(engine, request)
        reading = engine.canary(PROMPT + completion.token_ids)
        assert len(reading.logprobs) == len(PROMPT) + len(completion.token_ids) - 1
        read = reading.logprobs[len(PROMPT) - 1 :]
        worst = max(abs(a - b) for a, b in zip(read, completion.logprobs, strict=True))
        assert worst <= factory.tolerance


def test_a_stop_token_ends_a_completion_and_belongs_to_it(engine):
    ((free,),) = generate(engine, GenerationRequest(PROMPT, SamplingParams(6), seed=5))
    stop = free.token_ids[1]
    request = GenerationRequest(PROMPT, SamplingParams(6, stop_token_ids=(stop,)), seed=5)
    ((stopped,),) = generate(engine, request)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_a_stop_string_ends_a_completion(engine):
    ((free,),) = generate(engine, GenerationRequest(PROMPT, SamplingParams(6), seed=5))
    text = tiny_tokenizer().decode(free.token_ids[1:3])
    request = GenerationRequest(PROMPT, SamplingParams(6, stop=(text,)), seed=5)
    ((stopped,),) = generate(engine, request)
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:3], "stop")


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest((), SamplingParams(4)),
        GenerationRequest(PROMPT, SamplingParams(MAX_CONTEXT)),
    ],
    ids=["empty prompt", "longer than the context"],
)
def test_a_prompt_that_does_not_fit_is_refused(engine, request_):
    with pytest.raises(EngineError) as caught:
        generate(engine, request_)
    assert caught.value.remedy


def test_a_deadline_that_has_passed_raises_and_returns_nothing(engine):
    with pytest.raises(DeadlineExceeded, match="contract: too short"):
        engine.generate(
            [GenerationRequest(PROMPT, SamplingParams(40), n=4)], deadline=Deadline("contract: too short", 1e-9)
        )
    assert len(generate(engine, GenerationRequest(PROMPT, SamplingParams(2)))[0]) == 1


def test_a_paused_engine_generates_nothing_until_it_is_resumed(engine, factory):
    request = GenerationRequest(PROMPT, SamplingParams(3), seed=1)
    before = generate(engine, request)
    engine.pause()
    engine.pause(mode="abort")
    assert engine.health().paused and not engine.health().ready
    with ThreadPoolExecutor(1) as pool:
        if factory.waits:
            asked = pool.submit(generate, engine, request)
            with pytest.raises(DeadlineExceeded, match="contract: impatient"):
                engine.generate([request], deadline=Deadline("contract: impatient", 0.5))
            assert not asked.done(), "it waits"
        else:
            with pytest.raises(EngineError, match="paused"):
                generate(engine, request)
        assert engine.canary(PROMPT).logprobs, "weights are proved while the engine is paused"
        engine.resume()
        engine.resume()
        assert not factory.waits or asked.result(timeout=60) == before
    assert engine.health().ready and generate(engine, request) == before


def test_a_pause_that_aborts_ends_what_is_in_flight(engine):
    request = GenerationRequest(PROMPT, SamplingParams(100), n=8, seed=2)
    begun = threading.Event()
    whole = generate(engine, request)[0]
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(lambda: begun.set() or generate(engine, request))
        begun.wait(60)
        engine.canary(PROMPT)  # comes between two tokens, or before the first
        engine.pause(mode="abort")
        engine.resume()
        ((*aborted,),) = asked.result(timeout=60)
    for completion, full in zip(aborted, whole, strict=True):
        length = len(completion.token_ids)
        assert completion.token_ids == full.token_ids[:length]
        assert (completion.finish_reason == "abort") == (length < len(full.token_ids))


def test_health_and_canary_tell_version_and_session(engine):
    session = engine.health().session_id
    for version in (0, 7):
        engine.set_version(version)
        reading = engine.canary(PROMPT)
        assert (reading.version, reading.session_id) == (version, session)
        assert (engine.health().version, engine.health().session_id) == (version, session)
    assert session


def test_two_engines_have_different_sessions(engine, factory, request):
    other = factory.build([request.getfixturevalue(name) for name in factory.other])
    assert other.health().session_id != engine.health().session_id
    other.close()


def test_a_closed_engine_stays_closed(engine):
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: generate(engine),
        lambda: engine.canary(PROMPT),
        lambda: engine.set_version(1),
        engine.health,
        engine.pause,
        engine.resume,
    ]
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            call()
