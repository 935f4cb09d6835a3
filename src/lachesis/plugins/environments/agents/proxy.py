"""The server that agents talk to: OpenAI's, Anthropic's and Google's APIs before the run's engine, turns recorded."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from lachesis.common.errors import EngineError, LachesisError
from lachesis.common.hosts import OwnHostOnly
from lachesis.common.http import BodyTooLong, http_server, read_body
from lachesis.common.json_values import read_object
from lachesis.common.types import SamplingParams
from lachesis.plugins.environments.agents import chat, google, messages, responses
from lachesis.plugins.environments.agents.requests import Asked, BadRequest, Dialect, Event
from lachesis.plugins.environments.agents.session import AgentSession, Recorder
from lachesis.plugins.environments.turn_server import ModelServer, models_answer
from lachesis.rollouts.call_batcher import Completer

# Limit of a request: the longest conversations have a few MiB, and reading one holds up all other agents.
_MAX_BODY = 8 << 20
# Connections of one agent: each takes a descriptor of this process, and memory for a body.
_MAX_CONNECTIONS = 64
# Key in a request's scope that identifies the agent at the other end.
_DOOR = "lachesis.agent"
# Seconds that an agent's thread waits for its socket.
_START_S = 20.0
_ANSWERS: Mapping[Dialect, tuple[Callable[..., dict[str, Any]], Callable[..., Iterator[Event]]]] = {
    "chat": (chat.answer, chat.events),
    "responses": (responses.answer, responses.events),
    "messages": (messages.answer, messages.events),
    "google": (google.answer, google.events),
}


class AgentProxy(ModelServer):
    """Server of the model to agents. A request's key names its rollout. ``app`` is the application.

    Args:
        host: the address to listen at, which agents in containers have to reach.
    """

    def __init__(self, calls: Completer, recorder: Recorder, *, host: str = "127.0.0.1") -> None:
        self._recorder = recorder
        self._sessions: dict[str, AgentSession] = {}
        self._doors: dict[str, asyncio.Server] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = [
            Route("/v1/models", self._guarded("chat", self._models), methods=["GET"]),
            Route("/v1/chat/completions", self._turns("chat", chat.read), methods=["POST"]),
            Route("/v1/responses", self._guarded("responses", self._responses), methods=["POST"]),
            Route("/v1/messages", self._turns("messages", messages.read), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._guarded("messages", self._count), methods=["POST"]),
            Route("/v1beta/models/{call:path}", self._guarded("google", self._google), methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, middleware=[Middleware(OwnHostOnly, allowed=(host,))])
        super().__init__(calls, self.app, host=host)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().start()

    async def stop(self) -> None:
        self._loop = None
        await super().stop()

    def open(self, *, seed: int, params: SamplingParams) -> tuple[str, AgentSession]:
        """Return a key for a new rollout, and the session that will record it."""
        key, session = f"sk-{secrets.token_hex(16)}", AgentSession(seed=seed, params=params)
        self._sessions[key] = session
        return key, session

    def listen(self, key: str, listener: socket.socket) -> None:
        """Serve the key at a separate socket, and only there. Called from the agent's thread.

        Raises:
            EngineError: the proxy does not run.
        """
        app = self.app

        async def at_the_door(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, _DOOR: key}, receive, send)

        config = http_server(at_the_door).config
        config.load()
        state = ServerState()

        def connected() -> asyncio.Protocol:
            if len(state.connections) >= _MAX_CONNECTIONS:
                return _Refused()
            return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

        async def serve() -> asyncio.Server:
            return await asyncio.get_running_loop().create_server(connected, sock=listener)

        if self._loop is None:
            raise EngineError("the proxy for agents has ended")
        self._doors[key] = asyncio.run_coroutine_threadsafe(serve(), self._loop).result(_START_S)

    def close(self, key: str) -> None:
        """Stop recording and answering under the key."""
        if (session := self._sessions.pop(key, None)) is not None:
            session.closed = True
        if (door := self._doors.pop(key, None)) is not None:
            door.close()

    def _guarded(self, dialect: Dialect, handler: Callable[[Request], Awaitable[Response]]) -> Any:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except BadRequest as error:
                return _refusal(dialect, error.message, status=error.status, code=error.code)
            except LachesisError as error:
                self.failure = self.failure or error
                return _refusal(dialect, error.message, status=500, code="server_error")

        return guarded

    async def _models(self, request: Request) -> Response:
        self._session(request)
        return models_answer()

    def _turns(self, dialect: Dialect, read: Callable[[dict[str, Any]], Asked]) -> Any:
        async def turn(request: Request) -> Response:
            session = self._session(request)
            return await self._turn(session, _asked(read, await _body(request)), dialect)

        return self._guarded(dialect, turn)

    async def _responses(self, request: Request) -> Response:
        session, body = self._session(request), await _body(request)
        before = session.responses.get(str(earlier)) if (earlier := body.get("previous_response_id")) else ()
        if before is None:
            raise BadRequest(f"there is no response {earlier!r}", status=404)
        return await self._turn(session, _asked(partial(responses.read, before=before), body), "responses")

    async def _google(self, request: Request) -> Response:
        """Answer ``MODEL:METHOD``."""
        session = self._session(request)
        model, _, method = request.path_params["call"].rpartition(":")
        asked = _asked(
            partial(google.read, model=model, stream=method == "streamGenerateContent"), await _body(request)
        )
        if method == "countTokens":
            return JSONResponse({"totalTokens": len(self._recorder.render(asked))})
        if method not in ("generateContent", "streamGenerateContent"):
            raise BadRequest(f"there is no method {method!r}", status=404)
        return await self._turn(session, asked, "google")

    async def _count(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse({"input_tokens": len(self._recorder.render(_asked(messages.read, await _body(request))))})

    async def _turn(self, session: AgentSession, asked: Asked, dialect: Dialect) -> Response:
        prepared = self._recorder.prepare(session, asked)
        completions = await asyncio.gather(*(self.calls.complete(request) for request in prepared.requests))
        if session.closed or any(completion.finish_reason == "abort" for completion in completions):
            raise BadRequest("the rollout has ended", status=401)
        turns = [self._recorder.record(session, prepared, completion) for completion in completions]
        document, events = _ANSWERS[dialect]
        if not asked.stream:
            return JSONResponse(document(*turns))
        return StreamingResponse(_stream(events(*turns), dialect), media_type="text/event-stream")

    def _session(self, request: Request) -> AgentSession:
        """Find the session by the key, as each API's clients send it. Raises BadRequest for an unknown key."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        key = request.headers.get("x-api-key") or request.headers.get("x-goog-api-key") or bearer
        session, door = self._sessions.get(key), request.scope.get(_DOOR)
        if session is None or (door != key and (door is not None or key in self._doors)):
            raise BadRequest("the key belongs to no running rollout", status=401, code="invalid_api_key")
        return session


class _Refused(asyncio.Protocol):
    """Connection beyond an agent's limit, which is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _body(request: Request) -> dict[str, Any]:
    try:
        return await asyncio.to_thread(read_object, await read_body(request, limit=_MAX_BODY))
    except BodyTooLong as error:
        raise BadRequest(error.message, status=413) from error
    except ValueError as error:
        raise BadRequest(f"the body is not a JSON object: {error}") from error


def _asked(read: Callable[[dict[str, Any]], Asked], body: dict[str, Any]) -> Asked:
    """Parse an agent's request. Raises BadRequest if the body is not one of this API.

    Readers only translate the body, so they fail only if a part of it has the wrong type.
    """
    try:
        return read(body)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        kind = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadRequest(f"the body does not fit this API: {kind}") from error


async def _stream(events: Iterator[Event], dialect: Dialect) -> AsyncIterator[str]:
    for name, data in events:
        yield f"event: {name}\ndata: {json.dumps(data)}\n\n" if name else f"data: {json.dumps(data)}\n\n"
    if dialect == "chat":
        yield "data: [DONE]\n\n"


def _refusal(dialect: Dialect, message: str, *, status: int, code: str) -> Response:
    """Return an error in the API's form. Clients are told not to retry: they would get the same."""
    if dialect == "messages":
        kinds = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}
        kind = kinds.get(status, "invalid_request_error")
        document: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    elif dialect == "google":
        kinds = {401: "UNAUTHENTICATED", 404: "NOT_FOUND", 500: "INTERNAL"}
        kind = kinds.get(status, "INVALID_ARGUMENT")
        document = {"error": {"code": status, "message": message, "status": kind}}
    else:
        kind = "server_error" if status == 500 else "invalid_request_error"
        document = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(document, status_code=status, headers={"x-should-retry": "false"})
