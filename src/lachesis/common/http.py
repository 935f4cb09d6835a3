"""HTTP servers in this process, and addresses of servers. No torch."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lachesis.common.errors import ConfigError, DataError

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request

_BACKLOG = 2048
# Clients close idle connections sooner, so that no request meets one that the server is closing.
_KEEP_ALIVE_S = 75
# Bytes that a connection may send without any of a body, and without an answer.
_LONGEST_HEAD = 64 << 10


def free_port() -> int:
    """Return a port of this host that nothing listens on now; another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_url(url: str) -> str:
    """Return ``http://host:port`` of an address that may end in ``/`` or ``/v1``.

    Raises:
        ConfigError: ``url`` is not the address of a server.
    """
    wrong = ConfigError(f"{url!r} is not an address of an inference server", remedy="write it as http://127.0.0.1:9001")
    try:
        parts = urlsplit(url.strip())
        _ = parts.port  # read for its ValueError: an invalid port
    except ValueError as error:
        raise wrong from error
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise wrong
    # On this machine, the local address reaches a server that listens on all addresses.
    place = parts.netloc.replace("0.0.0.0", "127.0.0.1") if parts.hostname == "0.0.0.0" else parts.netloc
    return f"{parts.scheme}://{place}{path}"


class BodyTooLong(DataError):
    """A request body longer than the server accepts."""


async def read_body(request: Request, *, limit: int) -> bytes:
    """Read the body of a request; stop once it is longer than ``limit`` bytes.

    Raises:
        BodyTooLong: the body is longer than ``limit``.
    """
    declared = request.headers.get("content-length", "")
    too_long = BodyTooLong(f"the body is longer than {limit >> 20} MiB", remedy="send less in one request")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > limit:
            raise too_long
    return bytes(parts)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds a port but refuses connections until a server listens; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the address does not belong to this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        # Connections inherit it. asyncio sets it only if a socket names its protocol. Without it, the body of every
        # answer would wait 40 ms for the acknowledgement of its head.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            remedy="choose another --port, or stop the program that uses this one",
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections. Takes the arguments of :func:`bind`, and raises the same errors."""
    listener = bind(host, port)
    listener.listen(_BACKLOG)
    return listener


def url_host(host: str) -> str:
    """Return the host as a URL writes it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def url_of(listener: socket.socket) -> str:
    """Return the address that a socket is bound to, such as ``http://127.0.0.1:8002``."""
    host, port = listener.getsockname()[:2]
    return f"http://{url_host(host)}:{port}"


def http_server(app: Any, *, keep_alive_s: int = _KEEP_ALIVE_S, shutdown_s: int = 5) -> uvicorn.Server:
    """Return the server of an ASGI application, with the options of all our servers.

    Args:
        keep_alive_s: seconds after which an idle connection is closed.
        shutdown_s: seconds that running requests have when the server stops.
    """
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHeads(HttpToolsProtocol):
        """Connection that ends at an endless head or trailer, or at a flood of requests: uvicorn keeps all of them."""

        bare = 0

        def data_received(self, data: bytes) -> None:
            self.bare += len(data)
            super().data_received(data)
            if self.bare > _LONGEST_HEAD:
                self.transport.abort()

        def on_body(self, body: bytes) -> None:
            self.bare = 0
            super().on_body(body)

        def on_response_complete(self) -> None:
            self.bare = 0
            super().on_response_complete()

    config = uvicorn.Config(
        app, log_config=None, access_log=False, http=BoundedHeads, ws="none", server_header=False,
        timeout_keep_alive=keep_alive_s, timeout_graceful_shutdown=shutdown_s,
    )  # fmt: skip
    return uvicorn.Server(config)


class LoopServer:
    """HTTP server on the running event loop, at a free port. ``url`` is empty until it listens.

    Args:
        app: the ASGI application.
        host: address to listen on.
    """

    # For a run's own clients: a connection that closes just as a request arrives would mean a failed rollout.
    _IDLE_S = 3600

    def __init__(self, app: Any, *, host: str = "127.0.0.1") -> None:
        self.url = ""
        self._host = host
        self._server = http_server(app, keep_alive_s=self._IDLE_S, shutdown_s=1)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen. Raises ConfigError as :func:`bind`."""
        listener = listen(self._host, 0)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        self.url = url_of(listener)

    async def stop(self) -> None:
        """Close the port. Idempotent."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
