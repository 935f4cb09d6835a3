"""Generation over servers: shapes, balance, restarts, and what is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError
from lachesis.common.types import UNKNOWN_VERSIONS, SamplingParams, VersionSpan
from lachesis.plugins.atropos.environments import client as client_module
from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.settings import ServerConfig, SlurmConfig
from tests.unit.plugins.atropos.environments.servers import inference, logged_lines

PARAMS = SamplingParams(max_tokens=4, temperature=0.8)


def with_client(
    work: Callable[[InferenceClient], Awaitable[Any]],
    *urls: str,
    slurm: SlurmConfig | None = None,
    lines: list[str] | None = None,
    **config: Any,
) -> Any:
    async def run() -> Any:
        client = InferenceClient(ServerConfig(base_url=urls, **config), slurm=slurm)
        with logged_lines() as said:
            try:
                return await work(client)
            finally:
                await client.close()
                (lines if lines is not None else []).extend(said)

    return asyncio.run(run())


def generate(*urls: str, n: int = 1, **config: Any) -> Any:
    return with_client(lambda client: client.generate((7, 8), params=PARAMS, n=n), *urls, **config)


def answered(**document: Any) -> Callable[[str, Any], Response]:
    return lambda route, body: JSONResponse(document)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_our_server(suffix):
    with inference(version=3, answer=lambda prompt, n, body: [[5, 2], [5, 6, 7, 8]]) as (fake, url):
        first, second = generate(url + suffix, n=2, api_key="key")
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((5, 2), (-0.5, -0.5), "stop")
    assert (second.token_ids, second.finish_reason) == ((5, 6, 7, 8), "length")
    assert first.versions == VersionSpan(3, 3)
    ((route, body),) = fake.requests
    assert route == "/generate"
    assert body["prompt"] == {"prompt_token_ids": [7, 8]} and body["logprobs"] == 0
    assert (body["n"], body["max_tokens"], body["temperature"]) == (2, 4, 0.8)
    assert "seed" not in body
    assert fake.headers == ["Bearer key"]


def test_a_server_of_the_original_kind():
    """Only the documented lists: a mapping in a list for each position, and no versions."""
    reply = answered(logprobs=[[[{"5": -0.25}], [{"2": -1.5}]]], finish_reasons=["stop"], text=["x"])
    with inference(reply=reply) as (_, url):
        (sampled,) = generate(url)
    assert (sampled.token_ids, sampled.logprobs, sampled.versions) == ((5, 2), (-0.25, -1.5), UNKNOWN_VERSIONS)


def test_openai_routes():
    with inference(answer=lambda prompt, n, body: [[1, 2], [3, 2]]) as (fake, url):
        first, second = generate(f"{url}/v1", n=2, server_type="openai")
    assert (first.token_ids, second.token_ids) == ((1, 2), (3, 2))
    ((route, body),) = fake.requests
    assert route == "/v1/completions"
    assert (body["model"], body["prompt"], body["return_token_ids"]) == ("served", [7, 8], True)
    assert body["logprobs"] == 1


@pytest.mark.parametrize(
    ("kind", "reply", "message"),
    [
        ("vllm", {"token_ids": [[5]], "finish_reasons": ["stop"], "logprobs": None}, "no usable logprobs"),
        ("vllm", {"token_ids": [[5]], "token_logprobs": [[1.0]], "finish_reasons": ["stop"]}, "position 0 is 1.0"),
        ("vllm", {"token_ids": [[5, 6]], "token_logprobs": [[-1.0]], "finish_reasons": ["stop"]}, "2 tokens there are"),
        ("vllm", {"token_ids": [[5]], "token_logprobs": [[None]], "finish_reasons": ["stop"]}, "1 tokens there are 0"),
        ("vllm", {"token_ids": [[5], [6]], "token_logprobs": [[-1], [-1]], "finish_reasons": ["stop"]}, "instead of 1"),
        ("vllm", {"token_ids": [[5]], "token_logprobs": [[-1]], "finish_reasons": ["odd"]}, "odd"),
        ("vllm", {"text": ["x"]}, "finish_reasons"),
        ("vllm", {"logprobs": [[[]]], "finish_reasons": ["stop"]}, "gave an unexpected answer"),
        ("openai", {"choices": [{"index": 0, "finish_reason": "stop", "text": "x"}]}, "no usable logprobs"),
        (
            "openai",
            {"choices": [{"index": 0, "finish_reason": "stop", "logprobs": {"token_logprobs": [-1]}}]},
            "no token ids",
        ),
        ("openai", {}, "gave an unexpected answer"),
    ],
)
def test_answers_that_cannot_be_trained_on(kind, reply, message):
    with inference(reply=answered(**reply)) as (_, url), pytest.raises(EngineError) as caught:
        generate(url, server_type=kind)
    assert message in caught.value.message


def test_rounding_errors_are_no_faults():
    reply = answered(token_ids=[[5]], token_logprobs=[[1e-7]], finish_reasons=["stop"])
    with inference(reply=reply) as (_, url):
        (sampled,) = generate(url)
    assert sampled.logprobs == (0.0,) and not math.copysign(1, sampled.logprobs[0]) < 0


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_comes_back_is_waited_for(status):
    lines: list[str] = []
    with inference(failing=[status, status]) as (fake, url):
        (sampled,) = generate(url, lines=lines)
        assert len(fake.requests) == 3
    assert sampled.token_ids == (5, 2)
    assert len(lines) == 2
    assert "waiting for the inference server" in lines[0] and "not now -> wait" in lines[0]
    assert lines[1].endswith("answers")


def test_a_refused_request_is_not_sent_again():
    with inference(failing=[400]) as (fake, url):
        with pytest.raises(EngineError, match="answered 400: not now -> wait"):
            generate(url)
        assert len(fake.requests) == 1


def test_a_fault_of_the_server_that_stays_is_an_error():
    with inference(failing=[500] * 9) as (fake, url):
        with pytest.raises(EngineError, match="answered 500"):
            generate(url)
        assert len(fake.requests) == 5


def test_aborted_completions_are_asked_for_again():
    aborted = [True]

    def reply(route: str, body: Any) -> Response | None:
        if aborted:
            aborted.pop()
            return JSONResponse({"token_ids": [[]], "token_logprobs": [[]], "finish_reasons": ["abort"]})
        return None

    with inference(reply=reply) as (fake, url):
        (sampled,) = generate(url)
        assert len(fake.requests) == 2
    assert sampled.finish_reason == "stop"


def test_nobody_there():
    with pytest.raises(DeadlineExceeded, match="generation of 1 completions"):
        generate("http://127.0.0.1:9", timeout=0.15)
    with pytest.raises(DeadlineExceeded, match="waiting for the inference servers"):
        with_client(lambda client: client.wait_until_ready(), "http://127.0.0.1:9", timeout=0.05)


def test_several_servers_share_the_work_and_one_may_be_gone():
    def many(client: InferenceClient) -> Awaitable[Any]:
        return asyncio.gather(*(client.generate((1,), params=PARAMS) for _ in range(20)))

    with inference() as (one, first), inference() as (two, second):
        assert len(with_client(many, first, second)) == 20
        assert len(one.requests) == len(two.requests) == 10
        lines: list[str] = []
        assert len(with_client(many, first, "http://127.0.0.1:9", lines=lines)) == 20
        assert len(one.requests) == 30
    assert len([line for line in lines if "127.0.0.1:9," in line]) == 1


def test_the_same_server_twice():
    with pytest.raises(ConfigError, match="names a server twice"):
        with_client(lambda client: client.wait_until_ready(), "http://a:1", "http://a:1/v1")


def test_rate(monkeypatch):
    """Five requests, two a minute: each beyond the second waits a minute from the one two before it."""
    slept: list[float] = []
    really_sleep = asyncio.sleep
    loops: list[asyncio.AbstractEventLoop] = []

    async def sleep(seconds: float) -> None:
        """Servers of other tests may sleep in threads of their own."""
        if asyncio.get_running_loop() in loops:
            slept.append(seconds)
        else:
            await really_sleep(seconds)

    monkeypatch.setattr(client_module.asyncio, "sleep", sleep)

    async def five() -> None:
        loops.append(asyncio.get_running_loop())
        pace = client_module._Pace(2, 60.0)
        for _ in range(5):
            await pace.wait()

    asyncio.run(five())
    assert len(slept) == 3 and all(59 < seconds <= 60 for seconds in slept)


def test_model():
    with inference() as (_, url):
        assert with_client(lambda client: client.model_path(), url) == "/a/model"
        assert with_client(lambda client: client.model_name(), url) == "served"
        assert with_client(lambda client: client.model_name(), url, model_name="mine") == "mine"
    with pytest.raises(EngineError, match="which model is served"):
        with_client(lambda client: client.model_path(), "http://127.0.0.1:9")
