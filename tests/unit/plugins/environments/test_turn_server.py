"""The server in front of an engine, and what becomes of the turns that it kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, SamplingParams, VersionSpan
from lachesis.plugins.environments.turn_server import SESSION, Turn, TurnServer, joined
from lachesis.rollouts.call_batcher import CallBatcher
from tests.fakes import FakeEngine

PARAMS = SamplingParams(max_tokens=4)
SAMPLING = {"temperature": 1.0, "max_tokens": 3, "seed": 7, "logprobs": 1, "stop_token_ids": [2]}


def turn(prompt: tuple[int, ...], tokens: tuple[int, ...], version: int = 0) -> Turn:
    logprobs = tuple(-0.1 * token for token in tokens)
    return Turn(prompt, Completion(tokens, logprobs, "stop", VersionSpan(version, version)))


def decode(rows: list[list[int]]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def test_turns_that_continue_each_other_are_one_sample_and_what_was_added_is_masked():
    turns = [turn((8, 9), (3, 2), 4), turn((8, 9, 3, 2, 7, 7), (5, 2), 6)]
    (sample,) = joined(turns, decode=decode, temperature=0.7)
    assert sample.prompt_ids == (8, 9)
    assert sample.completion_ids == (3, 2, 7, 7, 5, 2)
    assert sample.loss_mask() == (1, 1, 0, 0, 1, 1)
    assert sample.logprobs == pytest.approx((-0.3, -0.2, 0.0, 0.0, -0.5, -0.2))
    assert (sample.versions, sample.temperature, sample.text) == ((4, 6), 0.7, "3 2 7 7 5 2")


def test_a_prompt_that_does_not_continue_begins_another_sample():
    first, second = joined([turn((8,), (3, 2)), turn((8, 3, 9), (5,))], decode=decode, temperature=1.0)
    assert (first.prompt_ids, first.completion_ids, first.mask) == ((8,), (3, 2), None)
    assert (second.prompt_ids, second.completion_ids, second.mask) == ((8, 3, 9), (5,), None)
    assert joined([], decode=decode, temperature=1.0) == []


def asked(engine: FakeEngine, ask: Callable[[httpx.AsyncClient, TurnServer], Awaitable[object]], **options: int):
    async def whole() -> object:
        settings = {"max_context": 16, "vocab_size": 32} | options
        at_once = settings.pop("at_once", 1)
        server = TurnServer(CallBatcher(engine, at_once=at_once), params=PARAMS, **settings)
        await server.start()
        server.begin(Deadline("a test", 20.0))
        try:
            async with httpx.AsyncClient(base_url=server.url, trust_env=False, headers={SESSION: "one"}) as client:
                return await ask(client, server)
        finally:
            await server.stop()
            await server.stop()

    return asyncio.run(whole())


def body(*token_ids: int, **sampling: object) -> dict[str, object]:
    return {"model": "policy", "token_ids": token_ids, "sampling_params": SAMPLING | sampling}


def test_what_it_answers_is_what_it_keeps_and_what_the_engine_sampled():
    engine = FakeEngine(lambda request, index: [len(request.prompt_ids), 2], version=5)

    async def ask(client: httpx.AsyncClient, server: TurnServer) -> None:
        answers = [
            (await client.post("/inference/v1/generate", json=body(*prompt))).json() for prompt in ((8, 9), (8,))
        ]
        turns = server.take("one")
        assert [turn.prompt_ids for turn in turns] == [(8, 9), (8,)]
        for answer, kept in zip(answers, turns, strict=True):
            (choice,) = answer["choices"]
            assert tuple(choice["token_ids"]) == kept.completion.token_ids
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
                f"token_id:{token}" for token in kept.completion.token_ids
            ]
            assert kept.completion.versions == (5, 5)
        assert server.take("one") == ()

    asked(engine, ask)
    first, second = (request for call in engine.requests for request in call)
    assert first.params.max_tokens == 3 and first.params.stop_token_ids == (2,)
    assert first.seed != second.seed, "each turn of a conversation draws anew"


def test_requests_that_come_together_go_in_one_call():
    engine = FakeEngine()

    async def ask(client: httpx.AsyncClient, server: TurnServer) -> None:
        posts = [client.post("/inference/v1/generate", json=body(8, number)) for number in range(6)]
        replies = await asyncio.gather(*posts)
        assert all(reply.is_success for reply in replies)

    asked(engine, ask)
    assert sum(map(len, engine.requests)) == 6
    assert len(engine.requests) < 6


def test_the_last_turn_gets_what_room_is_left_and_then_there_is_none():
    engine = FakeEngine(lambda request, index: [3] * request.params.max_tokens)

    async def ask(client: httpx.AsyncClient, server: TurnServer) -> None:
        reply = await client.post("/inference/v1/generate", json=body(*[8] * 15))
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        full = await client.post("/inference/v1/generate", json=body(*[8] * 16))
        assert full.status_code == 400 and "maximum context length" in full.text

    asked(engine, ask)
    assert engine.requests[0][0].params.max_tokens == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (body(99), "99"),
        (body(8, n=2), "n is 2"),
        (body(8, temperature="hot"), "temperature"),
        (body(), "empty"),
        (body(8) | {"priority": 3}, "priority"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(wrong: dict[str, object], said: str):
    async def ask(client: httpx.AsyncClient, server: TurnServer) -> None:
        reply = await client.post("/inference/v1/generate", json=wrong)
        assert reply.status_code == 400 and said in reply.text
        server.check()

    asked(FakeEngine(), ask)


def test_an_engine_that_fails_is_told_to_the_source():
    class Broken(FakeEngine):
        def generate(self, requests, *, deadline, finished=None):
            raise EngineError("out of memory")

    async def ask(client: httpx.AsyncClient, server: TurnServer) -> None:
        assert (await client.post("/inference/v1/generate", json=body(8))).status_code == 500
        with pytest.raises(EngineError, match="out of memory"):
            server.check()
        server.begin(Deadline("the next", 20.0))
        server.check()

    asked(Broken(), ask)


def test_turns_of_a_session_are_one_conversation_of_the_engine():
    engine = FakeEngine()

    async def ask(client: httpx.AsyncClient, server: TurnServer) -> None:
        for prompt in ((3,), (3, 4)):
            assert (await client.post("/inference/v1/generate", json=body(*prompt))).status_code == 200

    asked(engine, ask)
    assert [request.conversation for call in engine.requests for request in call] == ["one", "one"]
