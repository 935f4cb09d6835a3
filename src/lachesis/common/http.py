"""Addresses of servers. No torch."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from lachesis.common.errors import ConfigError


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
