"""All HTTP routes of an inference server, over any engine: the table, the guards, and generation."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError
from lachesis.engines.serving.bodies import Refused, error_document, parse_object
from lachesis.engines.serving.generation import (
    ARRAYS,
    GenerateBody,
    chunk_document,
    parse_sampled,
    result_arrays,
    result_document,
)
from lachesis.engines.serving.operations import OPERATIONS, Operation
from lachesis.engines.serving.served import ServedEngine
from lachesis.engines.serving.server import Server, check_model, check_prompt
from lachesis.engines.serving.session import Session

logger = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

_MAX_BODY = 32 << 20
_CLOSED_REQUEST = 499  # nobody reads it; the name that nginx gave it


def engine_routes(served: ServedEngine, *, session: Session, adapter_roots: Sequence[Path]) -> list[Route]:
    """The routes of one server, over one state.

    Args:
        served: the engine that answers.
        session: of this server; its token guards every route that changes something.
        adapter_roots: what is loaded or written is inside of these directories.
    """
    server = Server(served, session=session, adapter_roots=adapter_roots)

    async def generate(request: Request) -> Response:
        return await _generate(server, request)

    async def list_endpoints(request: Request) -> Response:
        return JSONResponse({"endpoints": [{"path": r.path, "methods": sorted(r.methods or ())} for r in routes]})

    routes = [
        Route("/generate", guarded(generate), methods=["POST"]),
        Route("/bridge/list_endpoints", guarded(list_endpoints), methods=["GET"]),
        *(
            Route(path, guarded(_endpoint(server, operation)), methods=[operation.method])
            for operation in OPERATIONS
            for path in (operation.path, *operation.aliases)
        ),
    ]
    return routes


def guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with every error as ``{"error": {"type", "message", "remedy"}}`` and its status."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except LachesisError as error:
            if not isinstance(error, Refused):
                logger.error("%s %s failed: %s", request.method, request.url.path, error)
            return error_response(error)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            reason = f"{type(error).__name__}: {error}"
            return error_response(EngineError(f"the server failed: {reason}", remedy="look at the server's log"))

    return answer


def error_response(error: LachesisError) -> JSONResponse:
    """Refused has its own status; a deadline is 504, anything else 500."""
    status = error.status if isinstance(error, Refused) else 504 if isinstance(error, DeadlineExceeded) else 500
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_document(error), status_code=status, headers=headers)


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request. Refused (413) above 32 MiB."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > _MAX_BODY:
            raise Refused(f"the body has more than {_MAX_BODY >> 20} MiB", status=413, remedy="send less at once")
    return parse_object(bytes(raw))


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Wait for ``work``, which is cancelled when the client goes away.

    Raises:
        Refused: the client has gone; what it says is read by nobody.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused("the client has gone", status=_CLOSED_REQUEST)
        return task.result()
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def event_stream(first: str, rest: AsyncIterator[str]) -> StreamingResponse:
    """Server-sent events: each text is one ``data:``, the last is ``[DONE]``; an error in between is an event."""

    async def events() -> AsyncIterator[str]:
        yield f"data: {first}\n\n"
        try:
            async for event in rest:
                yield f"data: {event}\n\n"
        except LachesisError as error:
            logger.error("a stream failed: %s", error)
            yield f"data: {json.dumps(error_document(error))}\n\n"
            return
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _endpoint(server: Server, operation: Operation[Any, Any]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        if operation.guarded:
            # Before the body: who may not change anything learns nothing about it.
            server.check_token(request.headers.get("authorization"))
        document = await read_body(request) if operation.method == "POST" else {}
        return JSONResponse(await server.run(operation, document))

    return endpoint


async def _generate(server: Server, request: Request) -> Response:
    served = server.served
    wanted = parse_sampled(GenerateBody, await read_body(request), sampling_fields=served.sampling_fields)
    described = served.model_info()
    check_model(wanted.model, info=described, adapter=served.adapter())
    check_prompt(wanted, info=described)
    if not wanted.stream:
        result = await while_connected(request, served.generate(wanted))
        if request.headers.get("accept") == ARRAYS:
            arrays = result_arrays(result, clock=server.clock, session_id=server.session.session_id)
            return Response(arrays, media_type=ARRAYS)
        answer = result_document(result, request=wanted, clock=server.clock)
        # Two numbers for each token: the standard library would hold up the server's loop several times as long.
        body = to_json(answer | {"session_id": server.session.session_id})
        return Response(body, media_type="application/json")
    chunks = _chunks(server, wanted)
    # The first chunk is waited for here, so that a request that is refused has a status of its own.
    first = await while_connected(request, anext(chunks))
    return event_stream(first, chunks)


async def _chunks(server: Server, wanted: GenerateBody) -> AsyncIterator[str]:
    first_versions: dict[int, int] = {}
    async with aclosing(server.served.stream(wanted)) as chunks:
        async for chunk in chunks:
            version = server.clock.at(chunk.time)
            first = first_versions.setdefault(chunk.index, version)
            document = chunk_document(chunk, request=wanted, versions=(first, version))
            yield json.dumps(document | {"session_id": server.session.session_id})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
