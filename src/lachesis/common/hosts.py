"""Guard against DNS rebinding: a foreign name in ``Host`` belongs to a web page that was rebound to this server.

After rebinding, the name of the page's site resolves to this machine, so the browser treats a request to this server
as same-origin: ``Origin`` and ``Host`` agree, and only the name itself tells. A page that was not rebound is
recognized by ``Origin``, or by ``Sec-Fetch-Site`` if its request has no ``Origin``.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Usual hosts in URLs of a server on this machine, or that it listens on.
_OF_THIS_MACHINE = ("127.0.0.1", "localhost", "0.0.0.0", "::1")
# Variable with further names, separated by commas, for a server that takes no arguments of ours.
VARIABLE = "LACHESIS_ALLOWED_HOSTS"


def is_this_machine(url: str) -> bool:
    """Return True if a URL leads to the machine that reads it."""
    return urlsplit(url).hostname in _OF_THIS_MACHINE


def is_own_name(host: str | None, *, allowed: Collection[str]) -> bool:
    """Return True if a ``Host`` header names this server.

    Accepted names: addresses, which no foreign page can have as its name; ``localhost`` and its subdomains; this
    machine's name; and ``allowed``. Programs may send no header at all; browsers always do.
    """
    if host is None:
        return True
    name = _without_port(host).rstrip(".").lower()
    if _is_address(name) or name == "localhost" or name.endswith(".localhost"):
        return True
    machine = socket.gethostname().lower()
    own = {machine, machine.partition(".")[0], *(one.rstrip(".").lower() for one in allowed)}
    return name in own


class OwnHostOnly:
    """ASGI middleware that refuses, with 403, requests to a name that is not this server's, or from a foreign page.

    Only browsers say from which page a request comes, and pages cannot forge that. Following a
    link is fine.

    Args:
        app: the application to guard.
        allowed: names to accept besides this server's; the environment variable adds to them.
    """

    def __init__(self, app: Application, allowed: Collection[str] = ()) -> None:
        self._app = app
        named = os.environ.get(VARIABLE, "")
        self._allowed = frozenset([*allowed, *filter(None, map(str.strip, named.split(",")))])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = _values(scope, b"host")
            wrong = [host for host in hosts if not is_own_name(host, allowed=self._allowed)]
            if wrong or len(hosts) > 1:
                await _refuse(send, f"this server is not {', '.join(wrong or hosts)!r}")
                return
            if (page := self._foreign_page(scope)) is not None:
                await _refuse(send, f"requests from a web page of {page} are refused")
                return
        await self._app(scope, receive, send)

    def _foreign_page(self, scope: Scope) -> str | None:
        """Return the foreign page's site that the browser names as the origin of the request, or None."""
        for origin in _values(scope, b"origin"):
            return None if self._is_own_page(origin, hosts=_values(scope, b"host")) else repr(origin)
        modes = _values(scope, b"sec-fetch-mode")
        if "cross-site" in _values(scope, b"sec-fetch-site") and modes != ["navigate"]:
            return "another site"
        return None

    def _is_own_page(self, origin: str, *, hosts: Sequence[str]) -> bool:
        """Return True if a page's origin has a name of this server, or an address of this machine or in ``Host``."""
        name = _without_port(origin.partition("://")[2])
        if _is_address(name):  # which any site may have, unlike a rebound name in `Host`
            own = (*self._allowed, *map(_without_port, hosts))
            return name in own or ipaddress.ip_address(name).is_loopback
        return is_own_name(name, allowed=self._allowed)


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == header]


async def _refuse(send: Send, message: str) -> None:
    """Send a 403 in the format of both the rollout API's and the inference servers' errors."""
    remedy = "use its address, or start it with --allowed-host NAME"
    document = {
        "detail": f"{message}; {remedy}",
        "error": {"type": "Refused", "message": message, "remedy": remedy},
    }
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
