from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from lachesis.common.errors import ConfigError
from lachesis.common.http import listen
from lachesis.plugins.atropos.api.server import ServerOptions, _is_foreign, build_app, serve
from tests.unit.plugins.atropos.api.processes import ours
from tests.waiting import LONG_S


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(ServerOptions(port=port))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_queued_tokens": 0}, "--max-queued-tokens"),
        ({"max_body_mb": -1.0}, "--max-body-mb"),
        ({"ack_timeout_s": float("nan")}, "--ack-timeout"),
        ({"env_timeout_s": 0.0}, "--env-timeout"),
        ({"state_dir": Path("/dev/null/x")}, "/dev/null/x"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], name: str):
    with pytest.raises(ConfigError, match=name):
        build_app(ServerOptions(**options))


def test_terminated_it_ends_in_order(tmp_path):
    with ours(tmp_path) as server:
        server.process.terminate()
        assert server.process.wait(timeout=LONG_S) in (0, -15)


def test_the_body_of_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, False),
        ({"host": "a:1", "origin": "http://a:1", "sec-fetch-site": "same-origin"}, False),
        ({"host": "a:1", "origin": "http://b"}, True),
        ({"host": "a:1", "origin": "null"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, True),
    ],
)
def test_foreign_pages(headers: dict[str, str], foreign: bool):
    assert _is_foreign(Headers(headers)) is foreign
