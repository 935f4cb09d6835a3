"""The rollout API as a process: options, application, and serving until a signal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lachesis.common.errors import ConfigError
from lachesis.common.hosts import OwnHostOnly
from lachesis.common.http import http_server, listen, url_of
from lachesis.plugins.atropos.api.journal import Journal, StoreFailed
from lachesis.plugins.atropos.api.reading import GroupReader
from lachesis.plugins.atropos.api.routes import Endpoints
from lachesis.plugins.atropos.api.state import QueueLimits, RolloutState
from lachesis.plugins.atropos.api.wire import Refusal
from lachesis.process.tasks import cancel

logger = logging.getLogger(__name__)

_SYNC_S = 1.0


class ServerOptions(QueueLimits):
    """Options of ``lachesis run-api``, besides the limits of the queue."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8002, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    state_dir: Path | None = Field(default=None, description="Directory that keeps the queue across restarts.")
    max_body_mb: float = Field(default=64.0, description="Refuse larger bodies, in MiB, before or after inflating.")
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host name that requests may use, besides addresses and this machine's own; may be repeated.",
    )


def serve(options: ServerOptions, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; the signal is raised again once the state directory is released.

    Args:
        on_ready: called with the address, such as ``http://127.0.0.1:8002``, once the port is bound.

    Raises:
        ConfigError: an option cannot be used, the port is taken, or the state directory is in use.
    """
    listener = listen(options.host, options.port)
    try:
        server = http_server(build_app(options))
        if on_ready is not None:
            on_ready(url_of(listener))
        server.run(sockets=[listener])
    finally:
        listener.close()


def build_app(options: ServerOptions) -> Starlette:
    """Build the application with its state and, if configured, the content of the state directory.

    Raises:
        ConfigError: an option or the state directory cannot be used.
    """
    _check(options)
    state = RolloutState(options)
    journal = Journal(options.state_dir) if options.state_dir else None
    if journal is not None:
        state.restore(journal.snapshot(), time.monotonic())
    endpoints = Endpoints(
        state=state,
        reader=GroupReader(check=options.strict),
        journal=journal,
        max_body=int(options.max_body_mb * (1 << 20)),
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        syncing = None if journal is None else asyncio.create_task(_sync(journal))
        try:
            yield
        finally:
            if syncing is not None:
                await cancel([syncing])
            endpoints.reader.close()
            if journal is not None:
                journal.close()

    return Starlette(
        routes=endpoints.routes(),
        lifespan=lifespan,
        middleware=[Middleware(OwnHostOnly, allowed=(options.host, *options.allowed_hosts)), Middleware(SameSiteOnly)],
        exception_handlers=dict.fromkeys((Refusal, StoreFailed, HTTPException), endpoints.refuse),
    )


class SameSiteOnly:
    """Guard against other web pages: one that a user has open must not reset or feed a training run.

    Refuses, with 403, requests that a browser marks as another site's. Other programs send no such marks.

    Browsers set ``Sec-Fetch-Site`` and ``Origin``, and pages cannot forge them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_foreign(Headers(scope=scope)):
            refusal = JSONResponse({"detail": "requests from other web sites are refused"}, status_code=403)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    site = headers.get("sec-fetch-site", "none")
    origin = headers.get("origin")
    same_origin = origin is None or origin.partition("://")[2] == headers.get("host")
    return site in ("cross-site", "same-site") or not same_origin


async def _sync(journal: Journal) -> None:
    """Flush the changes of each second to disk together."""
    while True:
        await asyncio.sleep(_SYNC_S)
        try:
            await asyncio.shield(asyncio.to_thread(journal.sync))
        except StoreFailed as error:
            logger.error("the state directory may not survive a power cut: %s", error)


def _check(options: ServerOptions) -> None:
    positive = {
        "--max-queued-tokens": options.max_queued_tokens,
        "--max-body-mb": options.max_body_mb,
        "--ack-timeout": options.ack_timeout_s,
        "--env-timeout": options.env_timeout_s,
    }
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}", remedy="give a number above 0, or leave it out")
