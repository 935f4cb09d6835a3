"""Our extension of vLLM's server: the plug-in that adds our routes, and the middleware around vLLM's own.

The plug-in's entry point is ``lachesis`` in ``vllm.endpoint_plugins``.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lachesis.common.errors import LachesisError
from lachesis.engines.serving.generation import POLICY
from lachesis.engines.serving.operations import TOKENS
from lachesis.engines.serving.server import engine_routes, error_response
from lachesis.engines.serving.session import new_session, remove_session, write_session
from lachesis.engines.vllm.chat_tokens import chat_tokens_route
from lachesis.transport.bridge_file import asked_at_start

if TYPE_CHECKING:
    from lachesis.engines.vllm.backend import VllmBackend

# Routes whose bodies have a field for the prefix cache's salt.
_SALTED = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/tokens",
    "/v1/responses", "/invocations",
)  # fmt: skip
_GENERATING = (*_SALTED, "/v1/messages", "/generative_scoring", "/v1/systemone")
# Routes that name a model but use no weights.
_NAMING = ("/tokenize", "/detokenize")

ROOTS_VARIABLE = "LACHESIS_ADAPTER_ROOTS"


class LachesisPlugin:
    """The plug-in: vLLM makes one per server, and gives it the application and later the engine."""

    name = "lachesis"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._app: Any = None

    def attach_router(self, app: Any) -> None:
        """Keep the application until :meth:`init_state` provides the engine for the routes."""
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Prepare the engine, write the session file, and add the routes.

        Raises:
            LachesisError: the engine's options are not supported; vLLM then ends.
        """
        from lachesis.engines.vllm.backend import VllmBackend

        roots = adapter_roots(os.environ.get(ROOTS_VARIABLE))
        session = new_session(host=args.host or "0.0.0.0", port=args.port, adapter_roots=roots)
        served = VllmBackend(
            engine_client, model=args.model, served_names=args.served_model_name or [args.model], session=session
        )
        await served.start()
        if served.lora_request is not None:
            # vLLM's own routes find the adapter by this name.
            state.openai_serving_models.lora_requests[served.lora_request.lora_name] = served.lora_request
        if (path := asked_at_start()) is not None:
            await served.export_shared(path)
        write_session(session)
        atexit.register(remove_session, session)
        state.lachesis = served
        routes = engine_routes(served, session=session, adapter_roots=roots)
        # vLLM's own route of this name, disabled by default, would take precedence.
        first = [route for route in routes if route.path == TOKENS.path]
        self._app.router.routes[:0] = first
        self._app.router.routes.extend(route for route in routes if route not in first)
        self._app.router.routes.append(chat_tokens_route(state))


def adapter_roots(variable: str | None) -> tuple[Path, ...]:
    """Return the directories in the variable, separated as in PATH; the current directory if it is unset."""
    named = [Path(part) for part in (variable or "").split(os.pathsep) if part]
    return tuple(path.resolve() for path in named) or (Path.cwd().resolve(),)


class ModelAliases:
    """An ASGI middleware, loaded with ``--middleware lachesis.engines.vllm.plugin.ModelAliases``.

    Requests to vLLM's generating routes wait while the engine is paused, get the model name that stands for the current
    weights, and the salt that protects them from stale blocks of the prefix cache. Requests to its tokenizer get the
    name only. The engine is in the application's state once the plug-in has put it there; until then requests pass
    unchanged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served: VllmBackend | None = None
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in (*_GENERATING, *_NAMING):
            served = getattr(scope["app"].state, "lachesis", None)
        if served is None:
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
            if scope["path"] in _GENERATING:
                await served.wait_until_running()
            if scope["path"] in _GENERATING and scope["path"] not in _SALTED:
                await served.empty_stale_cache()
        except ClientDisconnect:
            return
        except LachesisError as error:
            await error_response(error)(scope, receive, send)  # type: ignore[arg-type]
            return
        body = rewritten(body, served, salted=scope["path"] in _SALTED)
        await self._app(_with_length(scope, len(body)), _replayed(body, receive), send)


def rewritten(body: bytes, served: VllmBackend, *, salted: bool) -> bytes:
    """Return the body with the model name and the salt set; unchanged if it is not a JSON object."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(document, dict):
        return body
    if served.lora_request is not None and _is_alias(document.get("model"), served):
        document["model"] = POLICY
    elif _is_alias(document.get("model"), served):
        document["model"] = served.model_info().served_names[0]
    salt = document.get("cache_salt")
    if salted and (salt is None or (isinstance(salt, str) and salt)):
        document["cache_salt"] = served.cache_salt if salt is None else f"{served.cache_salt}:{salt}"
    return json.dumps(document).encode()


def _is_alias(name: Any, served: VllmBackend) -> bool:
    """Return True if a name, or its absence, means the served model."""
    info, adapter = served.model_info(), served.adapter()
    names: Sequence[str | None] = (None, "", POLICY, info.model, *info.served_names, adapter.name if adapter else None)
    return name in names


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that replays the body as if it had not been read yet."""
    pending: asyncio.Queue[Message] = asyncio.Queue()
    pending.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def replay() -> Message:
        return pending.get_nowait() if not pending.empty() else await receive()

    return replay


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}
