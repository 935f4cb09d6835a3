"""All HTTP routes of an inference server, over any engine: the table, the guards, and generation."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lachesis.common.errors import DeadlineExceeded, EngineError, LachesisError
from lachesis.engines.serving import changes, readings
from lachesis.engines.serving.bodies import parse_object
from lachesis.engines.serving.control import Control
from lachesis.engines.serving.served import GenerateChunk, GenerateRequest, Refused, ServedEngine
from lachesis.engines.serving.session import Session
from lachesis.engines.serving.wire import check_model, check_prompt, chunk_document, parse_generate, result_document

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Control, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
Endpoint = Callable[[Request], Awaitable[Response]]

_MAX_BODY = 32 << 20
_CLOSED_REQUEST = 499  # nobody reads it; the name that nginx gave it

_READING: dict[str, tuple[str, Handler]] = {
    "/health": ("GET", readings.health),
    "/health_generate": ("GET", readings.health_generate),
    "/lora/status": ("GET", readings.lora_status),
    "/nccl/status": ("GET", readings.nccl_status),
    "/bridge/info": ("GET", readings.info),
    "/bridge/is_paused": ("GET", readings.is_paused),
    "/bridge/is_sleeping": ("GET", readings.is_sleeping),
    "/bridge/debug": ("GET", readings.debug),
    "/bridge/state_dict_info": ("GET", readings.state_dict_info),
    "/bridge/canary": ("POST", readings.canary),
    "/bridge/digests": ("POST", readings.digests),
}
_CHANGING: dict[str, Handler] = {
    "/bridge/claim": changes.claim,
    "/bridge/release": changes.release,
    "/lora/load": changes.load_adapter,
    "/v1/load_lora_adapter": changes.load_adapter,
    "/set_lora_adapter": changes.load_adapter,
    "/set_lora_adapter/": changes.load_adapter,
    "/lora/unload": changes.unload_adapter,
    "/v1/unload_lora_adapter": changes.unload_adapter,
    "/nccl/start_receiver": changes.start_receiver,
    "/nccl/receive": changes.receive,
    "/nccl/stop_receiver": changes.stop_receiver,
    "/bridge/export": changes.export,
    "/bridge/pause": changes.pause,
    "/bridge/resume": changes.resume,
    "/bridge/sleep": changes.sleep,
    "/bridge/wake_up": changes.wake_up,
    "/bridge/reload": changes.reload,
    "/bridge/set_version": changes.set_version,
}


def engine_routes(served: ServedEngine, *, session: Session, adapter_roots: Sequence[Path]) -> list[Route]:
    """The routes of one server, over one state.

    Args:
        served: the engine that answers.
        session: of this server; its token guards every route that changes something.
        adapter_roots: what is loaded or written is inside of these directories.
    """
    control = Control(served, session=session, adapter_roots=adapter_roots)

    async def generate(request: Request) -> Response:
        return await _generate(control, request)

    async def list_endpoints(request: Request) -> Response:
        return JSONResponse({"endpoints": [{"path": r.path, "methods": sorted(r.methods or ())} for r in routes]})

    routes = [
        Route("/generate", guarded(generate), methods=["POST"]),
        Route("/bridge/list_endpoints", guarded(list_endpoints), methods=["GET"]),
        *(
            Route(path, guarded(_json_endpoint(control, handler, needs_token=False)), methods=[method])
            for path, (method, handler) in _READING.items()
        ),
        *(
            Route(path, guarded(_json_endpoint(control, handler, needs_token=True)), methods=["POST"])
            for path, handler in _CHANGING.items()
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


def error_document(error: LachesisError) -> dict[str, Any]:
    """An error in an answer."""
    kind = "EngineError" if isinstance(error, Refused) else type(error).__name__
    return {"error": {"type": kind, "message": error.message, "remedy": error.remedy}}


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


def _json_endpoint(control: Control, handler: Handler, *, needs_token: bool) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        if needs_token:
            # Before the body: who may not change anything learns nothing about it.
            control.check_token(request.headers.get("authorization"))
        document = await read_body(request) if request.method == "POST" else {}
        return JSONResponse(await handler(control, document))

    return endpoint


async def _generate(control: Control, request: Request) -> Response:
    served = control.served
    wanted, stream = parse_generate(await read_body(request), sampling_fields=served.sampling_fields)
    described = served.model_info()
    check_model(wanted.model, info=described, adapter=served.adapter())
    check_prompt(wanted, info=described)
    if not stream:
        result = await while_connected(request, served.generate(wanted))
        answer = result_document(result, request=wanted, clock=control.clock)
        # Two numbers for each token: the standard library would hold up the server's loop several times as long.
        body = to_json(answer | {"session_id": control.session.session_id})
        return Response(body, media_type="application/json")
    chunks = _chunks(control, wanted)
    # The first chunk is waited for here, so that a request that is refused has a status of its own.
    first = await while_connected(request, anext(chunks))
    return event_stream(first, chunks)


async def _chunks(control: Control, wanted: GenerateRequest) -> AsyncIterator[str]:
    first_versions: dict[int, int] = {}
    chunk: GenerateChunk
    async with aclosing(control.served.stream(wanted)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            version = control.clock.at(chunk.time)
            first = first_versions.setdefault(chunk.index, version)
            document = chunk_document(chunk, request=wanted, versions=(first, version))
            yield json.dumps(document | {"session_id": control.session.session_id})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
