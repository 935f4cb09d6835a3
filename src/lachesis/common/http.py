"""Addresses of servers. No torch."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from lachesis.common.errors import ConfigError

_BACKLOG = 2048


def free_port() -> int:
    """One of this host's that nothing listens on now; another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_url(url: str) -> str:
    """``http://host:port`` of an address that may end in ``/`` or ``/v1``.

    Raises:
        ConfigError: it is no address of a server.
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


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the address is none of this machine's.
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
