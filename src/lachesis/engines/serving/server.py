"""An inference server over any engine: its session, its owner, its routes, and one change of weights at a time."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import lachesis
from lachesis.common import http
from lachesis.common.errors import DeadlineExceeded, EngineError, EngineUnreachable, LachesisError
from lachesis.engines.serving import operations as ops
from lachesis.engines.serving.adapter_files import read_adapter
from lachesis.engines.serving.backend import AdapterStatus, DigestRequest, EngineBackend, ModelInfo, ReceiverSpec
from lachesis.engines.serving.bodies import Refused, error_document, parse, parse_object
from lachesis.engines.serving.generation import (
    ARRAYS,
    POLICY,
    GenerateBody,
    VersionClock,
    chunk_document,
    finite,
    parse_sampled,
    result_arrays,
    result_document,
)
from lachesis.engines.serving.session import TOKEN_VARIABLE, Session, session_path
from lachesis.engines.serving.tokens import TokensBody, generate_body, tokens_answer
from lachesis.process.tasks import unless

logger = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
Found = Mapping[str, Any] | None

_MAX_BODY = 32 << 20
# The body limit for models that take images, which are sent as the arrays that the model takes.
_MAX_WITH_IMAGES = 1 << 30
_CLOSED_REQUEST = 499  # nginx's status for a closed connection; no client reads it
_STATUS: dict[type[LachesisError], int] = {EngineUnreachable: 503, DeadlineExceeded: 504}
_PROBE_S = 30.0
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "LOGDIR", "VLLM_BRIDGE_CONFIG_PATH", "VLLM_ENABLE_SHARED_WEIGHTS", "NUM_INFERENCE_NODES",
)  # fmt: skip


class Server:
    """A server with its state, and a method for each operation that involves more than the engine.

    Args:
        served: the engine.
        session: the server's session.
        adapter_roots: the directories in which adapters, checkpoints and bridge files must be.
    """

    def __init__(self, served: EngineBackend, *, session: Session, adapter_roots: Sequence[Path]) -> None:
        self.served = served
        self.session = session
        self.clock = VersionClock()
        self.owner: str | None = None
        self.roots = tuple(Path(root).resolve() for root in adapter_roots)
        self._changing: str | None = None

    async def state(self) -> dict[str, Any]:
        """Return the server's state, from which each answer takes its fields.

        Raises:
            EngineUnreachable: the engine is dead.
        """
        self.served.check_alive()
        return {
            "weight_version": self.clock.current,
            "session_id": self.session.session_id,
            "paused": await self.served.is_paused(),
            "sleeping": await self.served.is_sleeping(),
            "owner": self.owner,
            "engine": self.served.kind,
            "model": self.served.model_info(),
            "pid": os.getpid(),
            "adapter": self.served.adapter(),
            "lachesis": lachesis.__version__,
            "generated_tokens": self.served.generated_tokens(),
            "receiver": self.served.receiver(),
            "adapter_roots": self.roots,
            "variables": {name: os.environ.get(name) for name in _VARIABLES},
        }

    def check_token(self, authorization: str | None) -> None:
        """Raise Refused (401) unless the header is ``Bearer`` and the session's token."""
        scheme, _, token = (authorization or "").partition(" ")
        where = f"it is in {session_path(self.session.port)} of the server's user, or in the variable {TOKEN_VARIABLE}"
        if scheme.lower() != "bearer" or not token:
            raise Refused(
                "this route needs the session's token", status=401, remedy=f"send Authorization: Bearer TOKEN; {where}"
            )
        if not hmac.compare_digest(token.strip().encode("latin-1", "replace"), self.session.token.encode()):
            raise Refused("this is not the token of this server's session", status=401, remedy=f"use that: {where}")

    def inside_roots(self, path: str) -> Path:
        """Return ``path`` without symbolic links.

        Raises:
            Refused: (403) the path, or an entry of that directory, is outside the adapter roots.
        """
        try:
            resolved = Path(path).expanduser().resolve()
            entries = list(resolved.iterdir()) if resolved.is_dir() else []
            targets = [resolved, *(entry.resolve() for entry in entries if entry.is_symlink())]
        except (OSError, RuntimeError, ValueError) as error:
            raise Refused(f"the path {path!r} cannot be resolved: {error}", remedy="give a directory") from error
        for target in targets:
            if not any(target.is_relative_to(root) for root in self.roots):
                allowed = ", ".join(map(str, self.roots)) or "none is set"
                raise Refused(
                    f"{path!r} leads outside the allowed directories ({allowed})",
                    status=403,
                    remedy="put it inside one of them, or start the server with --adapter-root DIRECTORY",
                )
        return resolved

    async def run(self, operation: ops.Operation[Any, Any], document: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operation on the object in a body, and return its answer.

        Raises:
            LachesisError: whatever the operation raises; :class:`Refused` for an invalid body.
        """
        request = parse(operation.request, document, context=self.inside_roots)
        fields = dict(request)

        async def work() -> Found:
            if own := getattr(self, operation.name, None):
                return await own(request)
            arguments = {name: value for name, value in fields.items() if name != ops.VERSION}
            return await getattr(self.served, operation.name)(**arguments)

        if operation.loading:
            what = operation.loading.format(**fields)
            found = await self._change_weights(what, work, version=fields[ops.VERSION])
        else:
            found = await work() if operation.name else None
        answer = operation.answer.model_validate(fields | await self.state() | dict(found or {}))
        return answer.model_dump(mode="json")

    async def _change_weights(self, what: str, change: Callable[[], Awaitable[Found]], *, version: int | None) -> Found:
        """Run ``change``, drop caches of the old weights, then record the version; ``None`` increments it.

        A failed change leaves the version. A change runs to its end even if the client disconnects.

        Raises:
            Refused: (409) another change is running; the error describes it.
        """
        if self._changing is not None:
            raise Refused(f"the weights are changing: {self._changing}", status=409, remedy="wait until that is done")
        self._changing = what

        async def whole() -> Found:
            try:
                answer = await change()
                await self.served.reset_prefix_cache()
                now = self.clock.current + 1 if version is None else version
                await self.served.label_weights(now)
                self.clock.record(now)
                return answer
            finally:
                self._changing = None

        return await asyncio.shield(asyncio.ensure_future(whole()))

    # Operations that involve more than the engine; their results go into the answer.

    async def health_generate(self, _: ops.Nothing) -> None:
        """Generate one token, or refuse (503) with the reason."""
        if await self.served.is_paused() or await self.served.is_sleeping():
            raise Refused("the engine is paused or asleep", status=503, remedy="resume it or wake it up")
        probe = GenerateBody(prompt_token_ids=(1,), sampling={"max_tokens": 1}, request_id="health_generate")
        try:
            async with asyncio.timeout(_PROBE_S):
                probed = await self.served.generate(probe)
            for completion in probed.completions:
                _finite(completion.logprobs)
        except TimeoutError as error:
            message = f"the engine generated no token within {_PROBE_S:g} s"
            raise Refused(message, status=503, remedy="look at the server's log") from error
        except EngineError as error:
            raise Refused(f"no token can be generated: {error.message}", status=503, remedy=error.remedy) from error

    async def generate_tokens(self, request: TokensBody) -> Found:
        wanted = generate_body(request, sampling_fields=self.served.sampling_fields)
        described = self.served.model_info()
        check_model(wanted.model, info=described, adapter=self.served.adapter())
        check_prompt(wanted, info=described)
        return dict(tokens_answer(await self.served.generate(wanted), request_id=wanted.request_id))

    async def lora_status(self, _: ops.Nothing) -> Found:
        adapter, described = self.served.adapter(), self.served.model_info()
        return {
            "status": "connected" if adapter else "idle",
            "detail": f"{adapter.name!r} is active" if adapter else "no adapter is loaded",
            "lora_enabled": described.lora_enabled,
            "max_lora_rank": described.max_lora_rank,
        }

    async def state_dict(self, _: ops.Nothing) -> Found:
        tensors = await self.served.state_dict_info()
        return {"num_params": len(tensors), "param_mappings": tensors}

    async def canary(self, request: ops.CanaryRequest) -> dict[str, Any]:
        info, token_ids = self.served.model_info(), request.token_ids
        if not 2 <= len(token_ids) <= info.max_model_len:
            message = f"a canary cannot have {len(token_ids)} tokens"
            raise Refused(message, remedy=f"give 2 to {info.max_model_len} token ids")
        check_token_ids(token_ids, info=info)
        logprobs, cached = await asyncio.gather(self.served.canary(token_ids), self.served.cached_tokens(token_ids))
        return {"logprobs": _finite(logprobs), "cached_tokens": cached}

    async def digests(self, request: DigestRequest) -> dict[str, Any]:
        return {"digests": await self.served.digests(request)}

    async def prove(self, request: ops.ProofRequest) -> Found:
        """Return canary and digests together: the canary waits for the engine's next step, digests run between two."""
        wanted = DigestRequest(slices=request.slices, adapter=request.adapter)
        canary, digests = await asyncio.gather(self.canary(request), self.digests(wanted))
        return {**canary, **digests}

    async def claim(self, request: ops.Claim) -> None:
        """Record that this owner changes the weights from now on. Refused (409) if there is another owner."""
        if self.owner not in (None, request.owner) and not request.takeover:
            raise Refused(
                f"this engine belongs to {self.owner!r}, so {request.owner!r} cannot use it",
                status=409,
                remedy="stop the other run and restart the engine, or take it over (engine.takeover: true)",
            )
        self.owner = request.owner

    async def release(self, request: ops.Release) -> None:
        """Undo :meth:`claim`. Idempotent; the claim of another run stays."""
        if self.owner == request.owner:
            self.owner = None

    async def load_adapter(self, request: ops.LoadAdapter) -> None:
        await asyncio.to_thread(read_adapter, request.adapter_path, max_rank=self._max_rank())
        await self.served.load_adapter(name=request.adapter_name, path=request.adapter_path)

    async def unload_adapter(self, request: ops.UnloadAdapter) -> None:
        loaded = self.served.adapter()
        name = request.adapter_name or (loaded.name if loaded else None)
        if name is None:
            raise Refused("no adapter is loaded", status=404, remedy="the base weights are served already")
        await self.served.unload_adapter(name=name)

    async def start_receiver(self, spec: ReceiverSpec) -> None:
        if spec.lora is not None and spec.lora.r > (max_rank := self._max_rank()):
            raise Refused(
                f"lora.r is {spec.lora.r}, but the server takes at most rank {max_rank}",
                status=422,
                remedy=f"start the server with --max-lora-rank {spec.lora.r}",
            )
        await self.served.start_receiver(spec)

    async def set_version(self, _: ops.NewVersion) -> None:
        """Record the version of weights that the trainer has written itself, into shared memory."""

    def _max_rank(self) -> int:
        info = self.served.model_info()
        if not info.lora_enabled:
            raise Refused("this server was started without LoRA", status=409, remedy="start it with --enable-lora")
        return info.max_lora_rank


def _finite(logprobs: Sequence[float]) -> list[float]:
    return [finite(value) for value in logprobs]


def check_model(name: str | None, *, info: ModelInfo, adapter: AdapterStatus | None) -> None:
    """Check a model name: the base's, ``policy`` and the adapter's name all mean the current weights.

    Raises:
        Refused: (404) it is not one of these names.
    """
    names = [*info.served_names, info.model, POLICY, *([adapter.name] if adapter else [])]
    if name is not None and name not in names:
        known = " or ".join(dict.fromkeys(names))
        raise Refused(f"this server has no model {name!r}", status=404, remedy=f"ask for {known}")


def check_prompt(request: GenerateBody, *, info: ModelInfo) -> None:
    """Check a prompt of token ids before generation.

    Raises:
        Refused: (400) a token is not in the vocabulary, or the context is too short for prompt and completion.
    """
    token_ids = request.prompt_token_ids
    if token_ids is None:
        return
    check_token_ids(token_ids, info=info)
    # Without max_tokens the engine generates as many as fit, at least one.
    wanted = request.sampling.get("max_tokens", 1)
    if len(token_ids) + wanted > info.max_model_len:
        raise Refused(
            f"the prompt has {len(token_ids)} tokens and {wanted} more are requested, but the context holds "
            f"{info.max_model_len}",
            remedy="shorten the prompt, lower max_tokens, or start the server with a larger --max-model-len",
        )


def check_token_ids(token_ids: Sequence[int], *, info: ModelInfo) -> None:
    """Raise Refused (400) for a token id outside the vocabulary."""
    if token_ids and max(token_ids) >= info.vocab_size:
        raise Refused(
            f"token id {max(token_ids)} is outside the range 0 to {info.vocab_size - 1}",
            remedy="use the tokenizer that belongs to the model",
        )


def engine_routes(served: EngineBackend, *, session: Session, adapter_roots: Sequence[Path]) -> list[Route]:
    """Return the routes of one server, which share one state.

    Args:
        served: the engine that answers.
        session: the server's session; its token guards every route that changes something.
        adapter_roots: only files inside these directories are loaded or written.
    """
    server = Server(served, session=session, adapter_roots=adapter_roots)

    async def list_endpoints(request: Request) -> Response:
        return JSONResponse({"endpoints": [{"path": r.path, "methods": sorted(r.methods or ())} for r in routes]})

    routes = [
        Route("/generate", guarded(partial(_generate, server)), methods=["POST"]),
        Route("/bridge/list_endpoints", guarded(list_endpoints), methods=["GET"]),
        *(
            Route(path, guarded(_endpoint(server, operation)), methods=[operation.method])
            for operation in ops.OPERATIONS
            for path in (operation.path, *operation.aliases)
        ),
    ]
    return routes


def guarded(endpoint: Endpoint) -> Endpoint:
    """Wrap the endpoint: every error becomes ``{"error": {"type", "message", "remedy"}}`` with its status."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except LachesisError as error:
            if not isinstance(error, Refused):
                logger.error("%s %s failed: %s", request.method, request.url.path, error)
            return error_response(error)
        except ClientDisconnect:  # during its request, for example because it was killed: the answer is not read
            return Response(status_code=400)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.exception("%s %s failed: %s", request.method, request.url.path, reason)
            return error_response(EngineError(f"the server failed: {reason}", remedy="look at the server's log"))

    return answer


def error_response(error: LachesisError) -> JSONResponse:
    """Return the response for an error: Refused has its own status, a dead engine 503, a deadline 504, others 500."""
    status = error.status if isinstance(error, Refused) else _STATUS.get(type(error), 500)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_document(error), status_code=status, headers=headers)


async def read_body(request: Request, *, limit: int = _MAX_BODY) -> dict[str, Any]:
    """Return the JSON object in the body of a request; raises Refused (413) above ``limit`` bytes."""
    try:
        return parse_object(await http.read_body(request, limit=limit))
    except http.BodyTooLong as error:
        raise Refused(error.message, status=413, remedy=error.remedy) from error


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Wait for ``work``, and cancel it when the client disconnects.

    Raises:
        Refused: the client has disconnected, so this error is not read.
    """
    found = await unless(_disconnected(request), work)
    if found is None:
        raise Refused("the client has disconnected", status=_CLOSED_REQUEST)
    return found


def event_stream(first: str, rest: AsyncIterator[str]) -> StreamingResponse:
    """Return server-sent events: each text becomes a ``data:`` event, an error too; the last event is ``[DONE]``."""

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


def _endpoint(server: Server, operation: ops.Operation[Any, Any]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        if operation.guarded:
            # Before parsing the body, so that unauthorized clients learn nothing about it.
            server.check_token(request.headers.get("authorization"))
        document = await read_body(request) if operation.method == "POST" else {}
        answer = server.run(operation, document)
        # Read-only operations are cancelled if their client disconnects.
        return JSONResponse(await (answer if operation.guarded else while_connected(request, answer)))

    return endpoint


async def _generate(server: Server, request: Request) -> Response:
    served = server.served
    document = await read_body(request, limit=_MAX_WITH_IMAGES if served.takes_images else _MAX_BODY)
    wanted = parse_sampled(GenerateBody, document, sampling_fields=served.sampling_fields)
    described = served.model_info()
    check_model(wanted.model, info=described, adapter=served.adapter())
    check_prompt(wanted, info=described)
    if wanted.stream and wanted.routed_experts:
        raise Refused("routed experts cannot be streamed", remedy="send stream: false")
    if not wanted.stream:
        result = await while_connected(request, served.generate(wanted))
        if request.headers.get("accept") == ARRAYS:
            arrays = result_arrays(result, clock=server.clock, session_id=server.session.session_id)
            return Response(arrays, media_type=ARRAYS)
        answer = result_document(result, request=wanted, clock=server.clock)
        # Two numbers per token: the standard library's json would block the event loop several times as long.
        body = to_json(answer | {"session_id": server.session.session_id})
        return Response(body, media_type="application/json")
    chunks = _chunks(server, wanted)
    # The first chunk is awaited here, so that a refused request gets its own status.
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
