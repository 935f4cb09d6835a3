"""Whom a server answers as: a name in ``Host`` that is none of its own is that of a web page that was rebound to it.

A page's browser takes the page's own site for the one that it asks, even where the name of that site has come to mean
this machine (DNS rebinding); then ``Origin`` and ``Host`` agree, and only the name itself tells. A page that was not
rebound is told by ``Origin``, or by ``Sec-Fetch-Site`` where its request has none.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Hosts of a URL by which a server of this machine is reached or listens, as people write them.
_OF_THIS_MACHINE = ("127.0.0.1", "localhost", "0.0.0.0", "::1")
# By which a server that takes no arguments of ours is told further names, with commas between them.
VARIABLE = "LACHESIS_ALLOWED_HOSTS"


def is_this_machine(url: str) -> bool:
    """Whether a URL leads to the machine that reads it, wherever that is."""
    return urlsplit(url).hostname in _OF_THIS_MACHINE


def is_own_name(host: str | None, *, allowed: Collection[str]) -> bool:
    """Whether a ``Host`` header names this server.

    Own are addresses, which no foreign page can have as its name, ``localhost`` and what ends in it, this machine's
    name, and those ``allowed``. Programs may send no header at all; browsers always do.
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

    Programs mark nothing; a browser says from which page a request comes, and pages cannot forge it. Following a
    link is fine.

    Args:
        app: what is guarded.
        allowed: names beside those that are own in any case; of the variable too.
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
                await _refuse(send, f"a web page of {page} has nothing to ask here")
                return
        await self._app(scope, receive, send)

    def _foreign_page(self, scope: Scope) -> str | None:
        """The site of another page that the request comes from, as its browser says; None where it is none."""
        for origin in _values(scope, b"origin"):
            name = urlsplit(origin).netloc if "://" in origin else ""
            if not name or not is_own_name(name, allowed=self._allowed):
                return repr(origin)
            return None
        modes = _values(scope, b"sec-fetch-mode")
        if "cross-site" in _values(scope, b"sec-fetch-site") and modes != ["navigate"]:
            return "another site"
        return None


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == header]


async def _refuse(send: Send, message: str) -> None:
    """In the shape of the rollout API's refusals and of the inference servers'."""
    remedy = "ask for it by its address, or start it with --allowed-host NAME"
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
