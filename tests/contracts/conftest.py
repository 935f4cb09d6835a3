"""Servers that the contract suites share: each kind is started once, when it is first needed, and by one worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests import warm
from tests.contracts.servers import EMBEDDED_SERVER, TOKEN, Server, ServerFactory, running
from tests.contracts.vllm_server import VLLM_SERVER, needs_vllm

HERE = Path(__file__).parent
# Groups of tests that one worker takes one after the other; the longest come first.
STARTED_ANEW, VLLM, EMBEDDED = "vLLM started anew", "vLLM", "the embedded server"
FIRST = [STARTED_ANEW, "test_server_contract vLLM", EMBEDDED, VLLM, "test_api_protocol"]


def group_of(item: pytest.Item) -> str:
    """By the servers that a test needs; by its file, if it shares none with another file."""
    file, vllm = item.path.stem, needs_vllm.mark in item.own_markers
    if file not in ("test_bridge_contract", "test_engine_contract", "test_vllm_turns", "test_verifiers_client"):
        return f"{file} vLLM" if vllm else file
    if not vllm:
        return EMBEDDED
    case = item.callspec.params.get("live") if hasattr(item, "callspec") else None  # type: ignore[attr-defined]
    return STARTED_ANEW if case is not None and case.restarts else VLLM


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "together(name): one process takes all tests of that name, one after the other")
    warm.start_servers(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for ``--forks``, in the order in which ``--forks-in-order`` deals them out."""

    def place(item: pytest.Item) -> int:
        group = next((mark.args[0] for mark in item.iter_markers("together")), "")
        return FIRST.index(group) if group in FIRST else len(FIRST)

    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.together(group_of(item)))
    items.sort(key=place)


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(EMBEDDED_SERVER, tmp_path_factory.mktemp("embedded")) as server:
        yield server


@pytest.fixture(scope="session")
def second_embedded_server(embedded_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with _beside(embedded_server, EMBEDDED_SERVER, tmp_path_factory.mktemp("second")) as server:
        yield server


@contextmanager
def _beside(first: Server, factory: ServerFactory, directory: Path) -> Iterator[Server]:
    """A server of the same model and the same root."""
    log = directory / "server.log"
    with factory.start(first.model, first.root, directory / "sessions", log) as url:
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


@pytest.fixture(scope="session")
def second_vllm_server(vllm_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with _beside(vllm_server, VLLM_SERVER, tmp_path_factory.mktemp("second-vllm")) as server:
        yield server


@pytest.fixture(scope="module")
def session_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a user who knows the servers' token, and whose own servers write their sessions apart."""
    with pytest.MonkeyPatch.context() as patch:
        warm.fork_servers(patch.setattr)
        patch.setenv("LACHESIS_SESSION_TOKEN", TOKEN)
        patch.setenv("LACHESIS_SESSION_DIR", str(tmp_path_factory.mktemp("sessions")))
        yield patch
