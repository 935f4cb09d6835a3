from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lachesis.common.errors import EngineError
from lachesis.engines.serving.backend import AdapterStatus, ModelInfo
from lachesis.engines.vllm.plugin import ModelAliases, rewritten

INFO = ModelInfo(
    model="/models/base", served_names=("base", "other"), dtype="float32", vocab_size=9, max_model_len=8,
    tensor_parallel_size=1, device="cpu", lora_enabled=True, max_lora_rank=4,
)  # fmt: skip


class FakeServed:
    def __init__(self, *, lora: bool = True) -> None:
        self.lora_request = object() if lora else None
        self.cache_salt = "salt"
        self.running = asyncio.Event()
        self.running.set()
        self.emptied = 0
        self.broken = False

    def model_info(self) -> ModelInfo:
        return INFO

    def adapter(self) -> AdapterStatus | None:
        return AdapterStatus("tuned", rank=2, alpha=4.0)

    async def wait_until_running(self) -> None:
        if self.broken:
            raise EngineError("no weights", remedy="load some")
        await self.running.wait()

    async def empty_stale_cache(self) -> None:
        self.emptied += 1


async def echo(request: Request) -> JSONResponse:
    body = await request.body()
    assert int(request.headers["content-length"]) == len(body)
    return JSONResponse({"body": body.decode()})


def application(served: FakeServed | None) -> Starlette:
    paths = ("/v1/completions", "/v1/messages", "/v1/embeddings")
    app = Starlette(routes=[Route(path, echo, methods=["POST"]) for path in paths])
    app.add_middleware(ModelAliases)
    if served is not None:
        app.state.lachesis = served
    return app


async def post(served: FakeServed | None, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    transport = httpx.ASGITransport(app=application(served))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.post(path, content=content)


def arrived(reply: httpx.Response) -> Any:
    return json.loads(reply.json()["body"])


@pytest.mark.parametrize("name", ["base", "other", "/models/base", "policy", "tuned", None, ""])
def test_every_name_of_the_model_means_the_adapter(name):
    reply = asyncio.run(post(FakeServed(), "/v1/completions", {"model": name, "prompt": "äö"}))
    assert arrived(reply) == {"model": "policy", "prompt": "äö", "cache_salt": "salt"}


def test_without_lora_they_mean_the_base():
    reply = asyncio.run(post(FakeServed(lora=False), "/v1/completions", {"model": "policy"}))
    assert arrived(reply)["model"] == "base"


def test_an_unknown_name_is_left_to_vllm_to_refuse():
    assert arrived(asyncio.run(post(FakeServed(), "/v1/completions", {"model": "gpt"})))["model"] == "gpt"


def test_a_salt_of_the_callers_is_kept_apart():
    reply = asyncio.run(post(FakeServed(), "/v1/completions", {"cache_salt": "mine"}))
    assert arrived(reply)["cache_salt"] == "salt:mine"


def test_a_route_without_salt_empties_the_cache():
    served = FakeServed()
    reply = asyncio.run(post(served, "/v1/messages", {"model": "base"}))
    assert arrived(reply) == {"model": "policy"} and served.emptied == 1


def test_other_routes_and_servers_that_start_are_left_alone():
    served = FakeServed()
    assert arrived(asyncio.run(post(served, "/v1/embeddings", {"model": "base"}))) == {"model": "base"}
    assert arrived(asyncio.run(post(None, "/v1/completions", {"model": "base"}))) == {"model": "base"}
    assert served.emptied == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_what_is_no_object_goes_through_as_it_is(body):
    assert rewritten(body, FakeServed(), salted=True) == body


def test_a_request_waits_while_the_engine_is_paused():
    async def run() -> None:
        served = FakeServed()
        served.running.clear()
        waiting = asyncio.ensure_future(post(served, "/v1/completions", {}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        served.running.set()
        assert (await waiting).status_code == 200

    asyncio.run(run())


def test_an_engine_that_cannot_serve_says_so():
    served = FakeServed()
    served.broken = True
    reply = asyncio.run(post(served, "/v1/completions", {}))
    assert reply.status_code == 500
    assert reply.json()["error"] == {"type": "EngineError", "message": "no weights", "remedy": "load some"}
