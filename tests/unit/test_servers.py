"""Each server of ours answers to its own names and to pages of its own only: a table over all of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lachesis.common.types import SamplingParams
from lachesis.engines.serving.session import new_session
from lachesis.plugins.atropos.api.server import ServerOptions, build_app
from lachesis.plugins.embedded_server.app import build_app as build_engine_app
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.turn_server import TurnServer
from lachesis.plugins.report.watch import Watch
from lachesis.plugins.serving.vllm_launch import plan_launch
from lachesis.plugins.tinker.clients import Clients
from lachesis.plugins.tinker.options import TinkerOptions
from lachesis.plugins.tinker.server import build_app as build_tinker_app
from tests.paths import PACKAGE
from tests.tiny import tiny_model, tiny_tokenizer


def rollout_api(directory: Path) -> Any:
    return build_app(ServerOptions())


def embedded_server(directory: Path) -> Any:
    """No request gets as far as its engine."""
    nothing: Any = None
    return build_engine_app(nothing, session=new_session(host="127.0.0.1", port=9, adapter_roots=(directory,)))


def watch_page(directory: Path) -> Any:
    return Watch([directory], token="secret").app()


def agent_proxy(directory: Path) -> Any:
    nothing: Any = None
    return AgentProxy(nothing, nothing).app


async def turn_server(directory: Path) -> Any:
    """Made within an event loop, as its calls are."""
    nothing: Any = None
    return TurnServer(nothing, params=SamplingParams(max_tokens=1), max_context=9, vocab_size=9).app()


def tinker_server(directory: Path) -> Any:
    tiny_model().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    options = TinkerOptions(model=str(directory / "model"), dir=directory / "tinker")
    return build_tinker_app(options, clients=Clients.single(None))


# A server, the file that makes it, and one route of each of its pages.
SERVERS: dict[str, tuple[Callable[[Path], Any], str, tuple[str, ...]]] = {
    "rollout API": (
        rollout_api,
        "plugins/atropos/api/server.py",
        ("/status", "/overview", "/healthz"),
    ),
    "embedded engine": (
        embedded_server,
        "plugins/embedded_server/app.py",
        ("/health", "/v1/models", "/bridge/info", "/generate"),
    ),
    "live page": (watch_page, "plugins/report/watch.py", ("/", "/data", "/rollouts", "/stop")),
    "server of turns": (
        lambda directory: asyncio.run(turn_server(directory)),
        "plugins/environments/turn_server.py",
        ("/v1/models", "/inference/v1/generate"),
    ),
    "tinker server": (tinker_server, "plugins/tinker/server.py", ("/api/v1/healthz", "/api/v1/create_session")),
    "proxy of agents": (agent_proxy, "plugins/environments/agents/proxy.py", ("/v1/models", "/v1/chat/completions")),
}
ROUTES = [(name, route) for name, (_, _, routes) in SERVERS.items() for route in routes]
FOREIGN = {
    "a rebound name": {"Host": "evil.example"},
    "a rebound page": {"Host": "evil.example:80", "Origin": "http://evil.example:80", "Sec-Fetch-Site": "same-origin"},
    "another site's page": {"Host": "127.0.0.1", "Origin": "http://evil.example"},
    "another machine's page": {"Host": "127.0.0.1", "Origin": "http://203.0.113.5"},
    "a page with a broken address": {"Host": "127.0.0.1", "Origin": "http://["},
    "a page without a name": {"Host": "127.0.0.1", "Origin": "null"},
    "what another site's page embeds": {
        "Host": "127.0.0.1", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors",
    },
}  # fmt: skip


@pytest.mark.parametrize("who", FOREIGN)
@pytest.mark.parametrize(("name", "route"), ROUTES)
def test_foreign_pages_get_403_wherever_they_ask(name: str, route: str, who: str, tmp_path: Path):
    client = TestClient(SERVERS[name][0](tmp_path))
    for method in ("GET", "POST", "OPTIONS"):
        assert client.request(method, route, headers=FOREIGN[who]).status_code == 403


@pytest.mark.parametrize("name", SERVERS)
def test_programs_and_own_pages_get_through(name: str, tmp_path: Path):
    client = TestClient(SERVERS[name][0](tmp_path), "http://127.0.0.1:7", raise_server_exceptions=False)
    for headers in ({}, {"Host": "localhost:7"}, {"Host": "127.0.0.1:7", "Origin": "http://127.0.0.1:7"}):
        assert client.get("/no-such-route", headers=headers).status_code == 404


def test_vllm_has_the_same_check_before_its_own_routes():
    launched = plan_launch(["--model", "m", "--port", "9"], environment={}).arguments
    middleware = [launched[at + 1] for at, word in enumerate(launched) if word == "--middleware"]
    assert "lachesis.common.hosts.OwnHostOnly" in middleware


def test_the_table_has_every_server():
    """Whoever makes an application, or listens to HTTP in another way, is in the table."""
    makes = re.compile(r"\bStarlette\(|FastAPI\(|HTTPServer\(|start_http_server\(|web\.Application\(")
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if makes.search(path.read_text())}
    assert files == {file for _, file, _ in SERVERS.values()}
