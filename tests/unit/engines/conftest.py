"""Fake servers for the tests of the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.engines.http import control, dispatch
from tests.unit.engines.fake_server import FakeServer


@pytest.fixture(scope="session")
def fake_servers() -> Iterator[list[FakeServer]]:
    """Those that run and that no test is using: starting and stopping one takes a while."""
    servers: list[FakeServer] = []
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def make_server(
    fake_servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FakeServer]]:
    """Fake servers, as new and without session files. A test may stop its own."""
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "sessions"))
    monkeypatch.delenv("LACHESIS_SESSION_TOKEN", raising=False)
    used: list[FakeServer] = []

    def make(**settings: Any) -> FakeServer:
        server = fake_servers.pop() if fake_servers else FakeServer()
        server.reset(**settings)
        used.append(server)
        return server

    yield make
    for server in used:
        if server.running:
            server.settle()
            fake_servers.append(server)


@pytest.fixture
def fake(make_server: Callable[..., FakeServer]) -> FakeServer:
    return make_server()


@pytest.fixture
def no_pause_before_trying_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting is tried again once, which is at once; half a second is waited before the second time."""
    for module in (control, dispatch):
        monkeypatch.setattr(module, "CONNECT_RETRIES", 1)
