"""A server that keeps the HTTP contract of inference servers and computes nothing. Runs in a thread."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from safetensors.numpy import save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis.engines.serving.generation import ARRAYS
from lachesis.engines.serving.session import new_session
from tests.threads import Thread
from tests.waiting import LONG_S, until

Body = dict[str, Any]


def refusal(status: int, message: str, *, remedy: str = "", kind: str = "Refused") -> JSONResponse:
    return JSONResponse({"error": {"type": kind, "message": message, "remedy": remedy}}, status_code=status)


@dataclass
class FakeState:
    """What tests look at and change. ``replies`` answers a route in another way than usual."""

    token: str = "secret"
    session_id: str = "fake-session"
    version: int = 0
    paused: bool = False
    sleeping: bool = False
    owner: str | None = None
    model: str = "fake"
    generated_tokens: int | None = None
    canary: float = -1.0
    digests: dict[str, str] = field(default_factory=lambda: {"a": "00000000000000ff", "b": "1"})
    requests: list[tuple[str, Body]] = field(default_factory=list)
    conversations: list[str | None] = field(default_factory=list)
    replies: dict[str, Callable[[Body], Response]] = field(default_factory=dict)
    in_flight: int = 0
    most_in_flight: int = 0
    aborted: int = 0
    # Set while /generate may answer; ``arrived`` is released once for every request.
    open: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def bodies(self, route: str) -> list[Body]:
        return [body for path, body in self.requests if path == route]


class FakeServer:
    """Runs from construction to :meth:`stop`; ``state`` is shared with the routes."""

    def __init__(self) -> None:
        self.state = FakeState()
        self.state.open.set()
        self._thread = Thread(_app(self.state))
        self.port, self.url = self._thread.port, self._thread.url

    @property
    def running(self) -> bool:
        return self._thread.running

    def reset(self, **settings: Any) -> None:
        """As new, with these fields of the state. Nothing may be in flight."""
        fresh = FakeState(**settings)
        fresh.open.set()
        for entry in fields(FakeState):
            setattr(self.state, entry.name, getattr(fresh, entry.name))

    def generate(self, body: Body) -> Any:
        """What /generate usually does."""
        return _generate(self.state, body)

    def gone(self, count: int) -> None:
        """Return once so many clients have left while their requests were held."""
        until(lambda: self.state.aborted >= count, "no client has left")

    def settle(self) -> None:
        """Return once nothing is in flight."""
        self.release()
        until(lambda: not self.state.in_flight, "requests hang in the fake server")

    def hold(self) -> None:
        """Let /generate wait from now on."""
        self._at_once(self.state.open.clear)

    def release(self) -> None:
        self._at_once(self.state.open.set)

    def _at_once(self, action: Callable[[], Any]) -> None:
        done = threading.Event()
        self._thread.loop.call_soon_threadsafe(lambda: (action(), done.set()))
        assert done.wait(LONG_S)

    def stop(self) -> None:
        self._thread.stop()


def _app(state: FakeState) -> Starlette:
    def route(path: str, handler: Callable[[Body], Any], *, guarded: bool = True, method: str = "POST") -> Route:
        async def endpoint(request: Request) -> Response:
            body = await request.json() if method == "POST" else {}
            if guarded and request.headers.get("authorization") != f"Bearer {state.token}":
                return refusal(401, "no valid token", remedy="use that of the session", kind="Unauthorized")
            state.requests.append((path, body))
            if path == "/generate":
                state.conversations.append(request.headers.get("x-session-id"))
            reply = state.replies[path](body) if path in state.replies else handler(body)
            if asyncio.iscoroutine(reply):
                reply = await _while_connected(state, request, reply)
            if isinstance(reply, Response):
                return reply
            if path == "/generate" and request.headers.get("accept") == ARRAYS:
                return Response(_arrays(reply), media_type=ARRAYS)
            return JSONResponse(reply)

        return Route(path, endpoint, methods=[method])

    def setting(name: str, value: Any) -> Callable[[Body], Body]:
        def handler(body: Body) -> Body:
            setattr(state, name, value(body) if callable(value) else value)
            return {name: getattr(state, name), "path": body.get("path", ""), "status": "connected"}

        return handler

    def version(body: Body) -> int:
        return body["weight_version"]

    stamp = lambda: {"weight_version": state.version, "session_id": state.session_id}  # noqa: E731
    return Starlette(
        routes=[
            route("/health", lambda body: {}, guarded=False, method="GET"),
            route("/generate", lambda body: _generate(state, body), guarded=False),
            route("/bridge/info", lambda body: _info(state), guarded=False, method="GET"),
            route(
                "/bridge/canary",
                lambda body: {"logprobs": [state.canary] * (len(body["token_ids"]) - 1), **stamp()},
                guarded=False,
            ),
            route("/bridge/digests", lambda body: {"digests": state.digests, **stamp()}, guarded=False),
            route(
                "/bridge/prove",
                lambda body: {
                    "logprobs": [state.canary] * (len(body["token_ids"]) - 1),
                    "digests": state.digests,
                    **stamp(),
                },
                guarded=False,
            ),
            route("/nccl/status", lambda body: {"status": "connected", "detail": "x"}, guarded=False, method="GET"),
            route(
                "/bridge/state_dict_info",
                lambda body: {
                    "num_params": 1,
                    "param_mappings": {"w": {"shape": [2, 3], "dtype": "bfloat16", "device": "cpu"}},
                },
                guarded=False,
                method="GET",
            ),
            route("/bridge/claim", lambda body: _claim(state, body)),
            route("/bridge/release", lambda body: _release(state, body)),
            route("/lora/load", setting("version", version)),
            route("/lora/unload", lambda body: {}),
            route("/nccl/start_receiver", lambda body: {"status": "connecting"}),
            route("/nccl/receive", setting("version", version)),
            route("/nccl/stop_receiver", lambda body: {"status": "idle"}),
            route("/bridge/export", lambda body: {"path": body["path"]}),
            route("/bridge/pause", setting("paused", True)),
            route("/bridge/resume", setting("paused", False)),
            route("/bridge/sleep", setting("sleeping", True)),
            route("/bridge/wake_up", setting("sleeping", False)),
            route("/bridge/reload", setting("version", version)),
            route("/bridge/set_version", setting("version", version)),
        ]
    )


async def _while_connected(state: FakeState, request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``, which ends when the client leaves."""
    task, left = asyncio.create_task(work), asyncio.create_task(request.receive())
    await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        state.aborted += 1
        return Response()
    left.cancel()
    return task.result()


def _info(state: FakeState) -> Body:
    session = new_session(host="127.0.0.1", port=1, token=state.token)
    return {
        "session_id": state.session_id,
        "weight_version": state.version,
        "paused": state.paused,
        "sleeping": state.sleeping,
        "owner": state.owner,
        "generated_tokens": state.generated_tokens,
        "engine": "fake",
        "model": state.model,
        "served_names": ["fake"],
        "dtype": "float32",
        "vocab_size": 32,
        "max_model_len": 64,
        "tensor_parallel_size": 1,
        "device": "cpu",
        "lora_enabled": True,
        "max_lora_rank": 16,
        "pid": session.pid,
        "adapter": None,
        "lachesis": "0",
    }


def _claim(state: FakeState, body: Body) -> Any:
    if state.owner not in (None, body["owner"]) and not body.get("takeover"):
        return refusal(409, f"the engine belongs to {state.owner}", remedy="stop that run, or take it over")
    state.owner = body["owner"]
    return {}


def _release(state: FakeState, body: Body) -> Any:
    state.owner = None if state.owner == body["owner"] else state.owner
    return {}


async def _generate(state: FakeState, body: Body) -> Any:
    state.in_flight += 1
    state.most_in_flight = max(state.most_in_flight, state.in_flight)
    state.arrived.release()
    try:
        await state.open.wait()
    finally:
        state.in_flight -= 1
    if len(body["prompt_token_ids"]) + body["max_tokens"] > 64:
        return refusal(400, "the prompt does not fit", remedy="shorten it")
    rows = [_tokens(body, index) for index in range(body["n"])]
    return {
        "text": [""] * len(rows),
        "prompt": None,
        "prompt_token_ids": body["prompt_token_ids"],
        "token_ids": rows,
        "finish_reasons": ["length" if len(row) == body["max_tokens"] else "stop" for row in rows],
        "logprobs": None,
        "token_logprobs": [[-0.5] * len(row) for row in rows],
        "weight_version": [{"first": state.version, "last": state.version}] * len(rows),
        "session_id": state.session_id,
    }


def _arrays(document: Body) -> bytes:
    flat = {
        name: np.concatenate([np.asarray(row) for row in document[name]]) for name in ("token_ids", "token_logprobs")
    }
    arrays = {
        "lengths": np.array([len(row) for row in document["token_ids"]], dtype=np.int64),
        "token_ids": flat["token_ids"].astype(np.int32),
        "token_logprobs": flat["token_logprobs"].astype(np.float32),
        "weight_version": np.array([[span["first"], span["last"]] for span in document["weight_version"]]),
    }
    reasons = json.dumps(document["finish_reasons"])
    return save(arrays, metadata={"session_id": document["session_id"], "finish_reasons": reasons})


def _tokens(body: Body, index: int) -> list[int]:
    """Between 1 and ``max_tokens`` tokens; equal for equal prompts, seeds and indices."""
    source = random.Random(f"{body['prompt_token_ids']}:{body['seed']}:{index}")
    return [source.randrange(32) for _ in range(source.randint(1, body["max_tokens"]))]
