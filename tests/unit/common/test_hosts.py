"""Requests to a name that is not the server's."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from lachesis.common.hosts import OwnHostOnly, is_own_name, is_this_machine


@pytest.mark.parametrize(
    "host",
    [
        None,
        "127.0.0.1:8002",
        "localhost",
        "LOCALHOST.:80",
        "run.localhost:1",
        "[::1]:8002",
        "10.1.2.3:8002",
        f"{socket.gethostname()}:8002",
        "node1.cluster:9001",
    ],
)
def test_its_own_names(host: str | None):
    assert is_own_name(host, allowed=["node1.cluster"])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8002", "127.0.0.1.evil.example", "", "node1:9001"])
def test_foreign_names(host: str):
    assert not is_own_name(host, allowed=["node1.cluster"])


def asked(*hosts: str, headers: dict[bytes, bytes] | None = None, **options: Any) -> list[dict[str, Any]]:
    """What is sent in answer to a request with these headers; nothing where the application gets it."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    scope = {"type": "http", "headers": [*((b"Host", host.encode()) for host in hosts), *(headers or {}).items()]}
    asyncio.run(OwnHostOnly(app, **options)(scope, None, send))  # type: ignore[arg-type]
    return sent


def test_a_foreign_name_is_refused_in_words():
    start, body = asked("evil.example:8002")
    assert start["status"] == 403
    document = json.loads(body["body"])
    assert document["error"]["message"] == "this server is not 'evil.example:8002'"
    assert "--allowed-host" in document["detail"]
    assert asked("localhost", "evil.example")[0]["status"] == 403
    assert not asked("localhost")


@pytest.mark.parametrize(
    ("origin", "own"),
    [
        ("http://127.0.0.1:3000", True),
        ("http://[::1]:3000", True),
        ("http://localhost:3000", True),
        ("http://10.0.0.5:3000", True),
        ("http://10.0.0.7", True),
        ("http://203.0.113.5", False),
        ("http://[2001:db8::5]:80", False),
        ("http://", False),
        ("http://[", False),
        ("http://]", False),
        ("null", False),
    ],
)
def test_pages_of_any_address_but_its_own_are_foreign(origin: str, own: bool):
    """Unlike a name in ``Host``, the address in ``Origin`` is that of the page, which may be anyone's."""
    headers = {b"host": b"10.0.0.5:8000", b"origin": origin.encode()}
    assert bool(asked(headers=headers, allowed=["10.0.0.7"])) != own


def test_further_names_come_from_options_and_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert not asked("api:8002", allowed=["api"])
    monkeypatch.setenv("LACHESIS_ALLOWED_HOSTS", "api, other")
    assert not asked("other:1")
    assert asked("third")


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost", True),
        ("http://0.0.0.0:1/x", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.7:8000", False),
        ("http://node1", False),
    ],
)
def test_which_urls_lead_to_this_machine(url: str, here: bool):
    assert is_this_machine(url) == here
