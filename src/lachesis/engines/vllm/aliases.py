"""All names of the model mean the weights in force, on every route of vLLM: middleware around its application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request

from lachesis.common.errors import LachesisError
from lachesis.engines.serving.generation import POLICY
from lachesis.engines.serving.routes import error_response

if TYPE_CHECKING:
    from lachesis.engines.vllm.served import ServedVllm

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Routes whose bodies have a field for the salt of the prefix cache.
_SALTED = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/inference/v1/generate", "/invocations",
)  # fmt: skip
_GENERATING = (*_SALTED, "/v1/messages", "/generative_scoring", "/v1/systemone")


class ModelAliases:
    """ASGI middleware, loaded with ``--middleware lachesis.engines.vllm.aliases.ModelAliases``.

    A request to one of vLLM's generating routes waits while the engine is paused, has its model's name replaced by
    the one that stands for the weights in force, and gets the salt that keeps it from stale blocks of the prefix
    cache. The engine is found in the application's state, where the plugin puts it; before that, nothing is done.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served: ServedVllm | None = None
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _GENERATING:
            served = getattr(scope["app"].state, "lachesis", None)
        if served is None:
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
            await served.wait_until_running()
            if scope["path"] not in _SALTED:
                await served.empty_stale_cache()
        except ClientDisconnect:
            return
        except LachesisError as error:
            await error_response(error)(scope, receive, send)  # type: ignore[arg-type]
            return
        body = rewritten(body, served, salted=scope["path"] in _SALTED)
        await self._app(_with_length(scope, len(body)), _replayed(body, receive), send)


def rewritten(body: bytes, served: ServedVllm, *, salted: bool) -> bytes:
    """The body with the model's name and the salt put in; as it was where it is no JSON object."""
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


def _is_alias(name: Any, served: ServedVllm) -> bool:
    """Whether a name, or none, means the model that is served."""
    info, adapter = served.model_info(), served.adapter()
    names: Sequence[str | None] = (None, "", POLICY, info.model, *info.served_names, adapter.name if adapter else None)
    return name in names


def _replayed(body: bytes, receive: Receive) -> Receive:
    """``receive`` as if the body had not been read yet."""
    pending: asyncio.Queue[Message] = asyncio.Queue()
    pending.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def replay() -> Message:
        return pending.get_nowait() if not pending.empty() else await receive()

    return replay


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}
