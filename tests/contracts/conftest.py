"""Servers that the contract suites share: each kind is started once, when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from tests.contracts.servers import EMBEDDED_SERVER, TOKEN, Server, running
from tests.contracts.vllm_server import VLLM_SERVER


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(EMBEDDED_SERVER, tmp_path_factory.mktemp("embedded")) as server:
        yield server


@pytest.fixture(scope="session")
def second_embedded_server(embedded_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Beside the first, with the same model and the same root."""
    directory = tmp_path_factory.mktemp("second")
    log = directory / "server.log"
    first = embedded_server
    with EMBEDDED_SERVER.start(first.model, first.root, directory / "sessions", log) as url:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with (
            httpx.Client(base_url=url, timeout=60, headers=headers, trust_env=False) as http,
            httpx.Client(base_url=url, timeout=60, trust_env=False) as stranger,
        ):
            yield replace(first, http=http, stranger=stranger, log=log)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(VLLM_SERVER, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="module")
def session_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a user who knows the servers' token, and whose own servers write their sessions apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LACHESIS_SESSION_TOKEN", TOKEN)
        patch.setenv("LACHESIS_SESSION_DIR", str(tmp_path_factory.mktemp("sessions")))
        yield patch
