"""Addresses of servers. No torch."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lachesis.common.errors import ConfigError, DataError

if TYPE_CHECKING:
    from starlette.requests import Request

_BACKLOG = 2048


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
    wrong = ConfigError(f"{url!r} is no address of an inference server", remedy="write it as http://127.0.0.1:9001")
    try:
        parts = urlsplit(url.strip())
        _ = parts.port  # read for its ValueError: a port beyond 65535, or none at all
    except ValueError as error:
        raise wrong from error
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise wrong
    # A server that listens on all addresses is reached on this machine by the local one.
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


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Connections inherit it. asyncio sets it only where a socket names its protocol, and without it the body of
        # every answer waits 40 ms for the acknowledgement of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            remedy="choose another --port, or stop what uses this one",
        ) from error
