"""What a server knows of a prompt before its engine does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from lachesis.common.errors import DeadlineExceeded, EngineError, EngineUnreachable
from lachesis.engines.serving.backend import AdapterStatus
from lachesis.engines.serving.bodies import Refused
from lachesis.engines.serving.generation import ARRAYS, read_arrays
from lachesis.engines.serving.server import check_model, check_prompt, engine_routes, guarded
from tests.unit.engines.serving.fakes import INFO, SESSION, FakeServed
from tests.unit.engines.serving.test_generation import generate
from tests.waiting import LONG_S


@pytest.mark.parametrize("name", [None, "tiny", "/models/tiny", "policy", "mine"])
def test_all_names_mean_the_weights_in_force(name):
    check_model(name, info=INFO, adapter=AdapterStatus("mine", 2, 4.0))
    with pytest.raises(Refused, match="no model 'other'") as caught:
        check_model("other", info=INFO, adapter=None)
    assert caught.value.status == 404 and "policy" in caught.value.remedy
    with pytest.raises(Refused):
        check_model("mine", info=INFO, adapter=None)


def test_prompts_have_tokens_that_the_model_knows_and_room_for_the_completion():
    fits = generate(prompt=None, prompt_token_ids=[5] * 30, max_tokens=2)
    check_prompt(fits, info=INFO)
    check_prompt(generate(prompt=None, prompt_token_ids=[99] * 31), info=INFO)
    check_prompt(generate(prompt="text" * 100), info=INFO)
    for wrong in (
        {"prompt_token_ids": [100]},
        {"prompt_token_ids": [5] * 32},
        {"prompt_token_ids": [5], "max_tokens": 32},
    ):
        with pytest.raises(Refused) as caught:
            check_prompt(generate(prompt=None, **wrong), info=INFO)
        assert caught.value.status == 400 and caught.value.remedy


TOKEN = {"Authorization": "Bearer secret"}


class Api:
    """The application over a fake engine, in the same event loop as the test."""

    def __init__(self, root: Path) -> None:
        self.served = FakeServed()
        self.app = Starlette(routes=engine_routes(self.served, session=SESSION, adapter_roots=[root]))
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.http.post(path, json={} if body is None else body, headers=TOKEN, **options)

    async def version(self) -> int:
        return (await self.http.get("/bridge/info")).json()["weight_version"]


@pytest.fixture
def drive(tmp_path: Path) -> Callable[[Callable[[Api], Coroutine[Any, Any, None]]], None]:
    """Run a test's coroutine with an Api."""

    def run(test: Callable[[Api], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(LONG_S):
                await test(Api(tmp_path))

        asyncio.run(main())

    return run


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


def test_a_change_resets_the_prefix_cache_before_its_version_counts(drive):
    async def test(api: Api) -> None:
        reply = await api.post("/nccl/receive", {"weight_version": 7})
        assert reply.status_code == 200 and reply.json()["weight_version"] == 7
        assert api.served.calls[-3:] == ["receive", "reset_prefix_cache", "label_weights"]
        assert api.served.labels[-1] == await api.version()
        api.served.hold["reset_prefix_cache"] = asyncio.Event()
        changing = asyncio.create_task(api.post("/bridge/set_version", {"weight_version": 8}))
        await until(lambda: api.served.calls[-1] == "reset_prefix_cache" and len(api.served.calls) > 2)
        assert await api.version() == 7
        api.served.hold["reset_prefix_cache"].set()
        assert (await changing).json()["weight_version"] == 8

    drive(test)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refused("no", status=422), 422),
        (EngineError("broken"), 500),
        (DeadlineExceeded("slow"), 504),
        (RuntimeError("CUDA"), 500),
    ],
)
def test_a_change_that_fails_leaves_the_version(drive, error, status):
    async def test(api: Api) -> None:
        await api.post("/bridge/set_version", {"weight_version": 3})
        api.served.fail["receive"] = error
        calls = len(api.served.calls)
        reply = await api.post("/nccl/receive", {"weight_version": 4})
        assert reply.status_code == status and set(reply.json()["error"]) == {"type", "message", "remedy"}
        assert await api.version() == 3 and "reset_prefix_cache" not in api.served.calls[calls:]
        del api.served.fail["receive"]
        assert (await api.post("/nccl/receive", {"weight_version": 4})).status_code == 200

    drive(test)


def test_one_change_at_a_time_while_readings_go_on(drive):
    async def test(api: Api) -> None:
        api.served.hold["receive"] = asyncio.Event()
        receiving = asyncio.create_task(api.post("/nccl/receive", {"weight_version": 4}))
        await until(lambda: "receive" in api.served.calls)
        for path, body in (("/nccl/receive", {"weight_version": 5}), ("/bridge/set_version", {"weight_version": 5})):
            reply = await api.post(path, body)
            assert reply.status_code == 409 and "receiving an update" in reply.json()["error"]["message"]
        assert (await api.http.post("/bridge/canary", json={"token_ids": [5, 6]})).json()["weight_version"] == 0
        assert (await api.post("/nccl/stop_receiver")).status_code == 200
        api.served.hold["receive"].set()
        assert (await receiving).json()["weight_version"] == 4

    drive(test)


def test_a_change_whose_client_has_gone_runs_to_its_end(drive):
    async def test(api: Api) -> None:
        api.served.hold["receive"] = asyncio.Event()
        receiving = asyncio.create_task(api.post("/nccl/receive", {"weight_version": 4}))
        await until(lambda: "receive" in api.served.calls)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        api.served.hold["receive"].set()
        while await api.version() != 4:
            await asyncio.sleep(0)
        assert not api.served.cancelled

    drive(test)


async def request_until_gone(app: Starlette, body: Any, gone: asyncio.Event) -> list[dict[str, Any]]:
    """A POST of /generate by the ASGI protocol, whose client goes when ``gone`` is set."""
    sent: list[dict[str, Any]] = []
    first = True

    async def receive() -> dict[str, Any]:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/generate", "raw_path": b"/generate", "query_string": b"",
        "headers": [], "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("name", ["generate", "stream"])
def test_a_client_that_goes_aborts_its_generation(drive, name):
    async def test(api: Api) -> None:
        api.served.hold[name] = asyncio.Event()
        gone = asyncio.Event()
        body = {"prompt": "a", "stream": name == "stream"}
        asking = asyncio.create_task(request_until_gone(api.app, body, gone))
        await until(lambda: name in api.served.calls)
        gone.set()
        await asking
        assert api.served.cancelled == [name]

    drive(test)


def test_the_answer_of_generate(drive):
    async def test(api: Api) -> None:
        await api.post("/bridge/set_version", {"weight_version": 2})
        body = {"prompt_token_ids": [4, 5], "n": 2, "temperature": 0.5, "stop": "x", "logit_bias": {"5": 1}}
        answer = (await api.post("/generate", body | {"logprobs": 0})).json()
        assert answer == {
            "text": ["ab", "ab"], "prompt": None, "prompt_token_ids": [4, 5], "token_ids": [[7, 8], [7, 8]],
            "finish_reasons": ["stop", "stop"], "logprobs": [[[{"7": -0.5}], [{"8": -9999.0}]]] * 2,
            "token_logprobs": [[-0.5, -9999.0]] * 2, "weight_version": [{"first": 2, "last": 2}] * 2,
            "session_id": "s1",
        }  # fmt: skip
        (request,) = api.served.requests
        assert request.sampling == {"temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}} and request.n == 2

    drive(test)


def test_the_answer_of_generate_as_arrays(drive):
    async def test(api: Api) -> None:
        await api.post("/bridge/set_version", {"weight_version": 2})
        body = {"prompt_token_ids": [4, 5], "n": 2, "text": False}
        document = (await api.post("/generate", body)).json()
        reply = await api.http.post("/generate", json=body, headers={"Accept": ARRAYS})
        assert reply.headers["content-type"] == ARRAYS
        found = read_arrays(reply.content)
        assert found == {name: document[name] for name in found}
        assert [request.text for request in api.served.requests] == [False, False]
        for cut in (0, 4, 20, len(reply.content) - 1):
            with pytest.raises((KeyError, ValueError)):
                read_arrays(reply.content[:cut])

    drive(test)


def test_versions_of_a_stream_are_those_of_its_tokens(drive):
    async def test(api: Api) -> None:
        api.served.hold["stream"] = asyncio.Event()
        reading = asyncio.create_task(api.post("/generate", {"prompt": "a", "stream": True}))
        await until(lambda: "stream" in api.served.calls)
        await api.post("/bridge/set_version", {"weight_version": 6})
        api.served.hold["stream"].set()
        events = [line.removeprefix("data: ") for line in (await reading).text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        assert [json.loads(event)["weight_version"] for event in events[:-1]] == [
            {"first": 0, "last": 0},
            {"first": 0, "last": 6},
        ]

    drive(test)


def test_an_error_inside_a_stream_is_its_last_event(drive):
    async def test(api: Api) -> None:
        api.served.fail["stream"] = EngineError("the engine died", remedy="restart it")
        events = (await api.post("/generate", {"prompt": "a", "stream": True})).text.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "the engine died"
        assert "[DONE]" not in events[-1] and len(events) == 2

    drive(test)


def test_health(drive):
    async def test(api: Api) -> None:
        assert (await api.http.get("/health")).json() == {}
        assert (await api.http.get("/health_generate")).status_code == 200
        api.served.paused = True
        assert (await api.http.get("/health_generate")).status_code == 503
        assert (await api.http.get("/health")).status_code == 200
        api.served.paused = False
        api.served.fail["generate"] = EngineError("out of memory")
        reply = await api.http.get("/health_generate")
        assert reply.status_code == 503 and "out of memory" in reply.json()["error"]["message"]
        api.served.fail["health"] = EngineError("the engine is dead")
        assert (await api.http.get("/health")).status_code >= 500

    drive(test)


def test_a_server_says_how_it_stands_only_while_its_engine_lives(drive):
    async def test(api: Api) -> None:
        assert (await api.http.get("/bridge/info")).status_code == 200
        api.served.fail["check_alive"] = EngineUnreachable("the engine is dead")
        reply = await api.http.get("/bridge/info")
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "EngineUnreachable"

    drive(test)


def test_the_token_is_asked_for_before_the_body_is_read(drive):
    async def test(api: Api) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "bearer"}):
            reply = await api.http.post("/bridge/pause", content=b"no json", headers=headers)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
            assert "LACHESIS_SESSION_TOKEN" in reply.json()["error"]["remedy"]
        assert not api.served.calls
        reply = await api.http.post("/bridge/pause", content=b"no json", headers=TOKEN)
        assert reply.status_code == 400

    drive(test)


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/bridge/pause", ("pause", "keep")),
        ("/bridge/resume", "resume"),
        ("/bridge/sleep", ("sleep", 1)),
        ("/bridge/wake_up", ("wake_up", ("weights", "kv_cache"))),
        ("/nccl/stop_receiver", "stop_receiver"),
    ],
)
def test_bodies_may_be_left_out_where_nothing_is_needed(drive, path, call):
    async def test(api: Api) -> None:
        assert (await api.http.post(path, headers=TOKEN)).status_code == 200
        assert api.served.calls == [call]
        reply = await api.post(path, {"surprise": 1})
        assert reply.status_code == 400 and "surprise" in reply.json()["error"]["message"]

    drive(test)


def test_what_is_inside_a_root_reaches_the_engine_without_links(drive, tmp_path):
    async def test(api: Api) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        reply = await api.post("/bridge/reload", {"path": str(tmp_path / "link" / ".." / "link")})
        assert reply.status_code == 200 and api.served.calls[0] == ("reload", tmp_path / "real")
        for outside in (tmp_path.parent, tmp_path / "..", "/", f"{tmp_path}x"):
            assert (await api.post("/bridge/reload", {"path": str(outside)})).status_code == 403
        assert api.served.calls[1:] == ["reset_prefix_cache", "label_weights"]

    drive(test)


def test_an_adapter_is_unloaded_by_its_name_or_as_the_one_in_force(drive, tmp_path):
    async def test(api: Api) -> None:
        reply = await api.post("/lora/unload")
        assert reply.status_code == 404 and "no adapter is loaded" in reply.json()["error"]["message"]
        for body in ({}, {"adapter_name": "mine"}, {"lora_name": "mine"}):
            await api.served.load_adapter(name="mine", path=tmp_path)
            reply = await api.post("/lora/unload", body)
            assert reply.status_code == 200 and reply.json()["adapter"] is None
            assert ("unload_adapter", "mine") in api.served.calls

    drive(test)


def test_logprobs_of_broken_weights_are_an_error_that_says_so(drive):
    async def test(api: Api) -> None:
        async def canary(token_ids: Any) -> tuple[float, ...]:
            return (float("nan"),)

        api.served.canary = canary  # type: ignore[method-assign]
        reply = await api.post("/bridge/canary", {"token_ids": [5, 6]})
        assert reply.status_code == 500 and reply.json()["error"]["type"] == "EngineError"
        assert "not finite" in reply.json()["error"]["message"] and "NaN" in reply.json()["error"]["remedy"]
        api.served.logprobs = (-0.5, float("nan"))
        for path, status in (("/generate", 500), ("/health_generate", 503)):
            reply = await api.http.request("POST" if status == 500 else "GET", path, json={"prompt": "a"})
            assert reply.status_code == status and "not finite" in reply.json()["error"]["message"]
        reply = await api.http.post("/generate", json={"prompt": "a"}, headers={"Accept": ARRAYS})
        assert reply.status_code == 500 and "not finite" in reply.json()["error"]["message"]

    drive(test)


def test_a_claim_is_given_back_by_its_owner_only(drive):
    async def test(api: Api) -> None:
        await api.post("/bridge/claim", {"owner": "one"})
        assert (await api.post("/bridge/release", {"owner": "two"})).json()["owner"] == "one"
        assert (await api.post("/bridge/claim", {"owner": "two"})).status_code == 409
        for _ in range(2):
            assert (await api.post("/bridge/release", {"owner": "one"})).json()["owner"] is None
        assert (await api.post("/bridge/claim", {"owner": "two"})).status_code == 200

    drive(test)


def test_the_readings_of_the_documented_server(drive, monkeypatch, tmp_path):
    monkeypatch.setenv("LOGDIR", "/logs")
    monkeypatch.delenv("VLLM_ENABLE_SHARED_WEIGHTS", raising=False)

    async def test(api: Api) -> None:
        async def read(path: str) -> dict[str, Any]:
            reply = await api.http.get(path)
            assert reply.status_code == 200, reply.text
            return reply.json()

        await api.post("/bridge/pause")
        assert (await read("/bridge/is_paused"))["paused"] and not (await read("/bridge/is_sleeping"))["sleeping"]
        await api.post("/bridge/resume")
        await api.post("/bridge/sleep")
        assert not (await read("/bridge/is_paused"))["paused"] and (await read("/bridge/is_sleeping"))["sleeping"]
        debug = await read("/bridge/debug")
        assert debug["engine"] == "fake" and debug["receiver"]["status"] == "idle"
        assert debug["adapter_roots"] == [str(tmp_path)] and "secret" not in str(debug)
        assert (debug["variables"]["LOGDIR"], debug["variables"]["VLLM_ENABLE_SHARED_WEIGHTS"]) == ("/logs", None)
        listed = {entry["path"]: entry["methods"] for entry in (await read("/bridge/list_endpoints"))["endpoints"]}
        assert listed["/generate"] == ["POST"] and "GET" in listed["/bridge/info"] and "/lora/load" in listed

    drive(test)


@pytest.mark.parametrize(
    ("error", "said"), [(ClientDisconnect(), []), (KeyError("b"), ["POST /a failed: KeyError: 'b'"])]
)
def test_a_client_that_is_killed_in_the_midst_of_its_request_is_no_error(
    error: Exception, said: list[str], caplog: pytest.LogCaptureFixture
):
    async def fails(request: Request) -> Response:
        raise error

    request = Request({"type": "http", "method": "POST", "path": "/a", "headers": [], "query_string": b""})
    response = asyncio.run(guarded(fails)(request))
    assert response.status_code == (500 if said else 400)
    assert caplog.messages == said
