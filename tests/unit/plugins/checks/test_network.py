"""What is said of addresses: real servers, dead ones, and ports that are taken."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from lachesis.config.schema import LachesisConfig
from lachesis.engines.http import control
from lachesis.engines.serving.backend import ModelInfo
from lachesis.engines.serving.operations import ServerInfo
from lachesis.plugins.atropos.api.server import ServerOptions, build_app
from lachesis.plugins.checks import network
from lachesis.plugins.checks.doctor import trials
from lachesis.plugins.checks.findings import Check
from lachesis.plugins.checks.network import try_ports, try_servers
from tests.ports import free_port
from tests.threads import Thread as AppThread
from tests.unit.engines.fake_server import FakeServer

TINY = ModelInfo(
    model="tiny", served_names=(), dtype="float32", vocab_size=8, max_model_len=32, tensor_parallel_size=1,
    device="cpu", lora_enabled=False, max_lora_rank=0,
)  # fmt: skip
INFO = ServerInfo(paused=False, sleeping=False, engine="embedded", pid=1, model=TINY, weight_version=7, session_id="a")


def config(**sections: Any) -> LachesisConfig:
    return LachesisConfig.model_validate({"run": {"steps": 1}, "model": {"path": "none"}, **sections})


def over(*urls: str, **engine: Any) -> LachesisConfig:
    return config(engine={"kind": "http", "urls": list(urls), **engine}, bridge={"kind": "broadcast"})


def by_subject(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.subject: check for check in checks}


@contextmanager
def serving(routes: dict[str, Any], *, silent_s: float = 0.0) -> Iterator[str]:
    """A server that answers after so many seconds. A number is a refusal."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(silent_s)
            body = routes.get(self.path)
            self.send_response(404 if body is None else body if isinstance(body, int) else 200)
            self.end_headers()
            with suppress(BrokenPipeError):  # who asked waits no more
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Not on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class TestServers:
    def test_an_engine_says_what_it_is(self):
        server = FakeServer()
        try:
            found = by_subject(try_servers(over(server.url)))
        finally:
            server.stop()
        engine = found[f"engine 127.0.0.1:{server.port}"]
        assert not engine.failed and "engine at weight version 0 (limit 5 s)" in engine.message

    def test_a_dead_one_fails_and_the_others_are_asked_all_the_same(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(control, "CONNECT_RETRIES", 0)
        dead = f"http://127.0.0.1:{free_port()}"
        with serving({"/bridge/info": INFO.model_dump(mode="json")}) as url:
            lost, found = try_servers(over(dead, url))
        assert lost.failed and f"{dead} does not answer (limit 5 s)" in lost.message and "-> start it" in lost.message
        assert not found.failed

    def test_one_that_a_run_waits_for_is_no_failure(self):
        (missing,) = try_servers(over(f"http://127.0.0.1:{free_port()}", wait_s=60))
        assert not missing.failed and not missing.applies and "a run waits 60 s for it" in missing.message

    def test_one_that_says_nothing_is_given_up(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(network, "LIMIT_S", 0.1)
        with serving({"/bridge/info": {}}, silent_s=0.4) as url:
            (engine,) = try_servers(over(url))
        assert engine.failed and "timed out" in engine.message

    def test_another_kind_of_server_is_no_engine(self):
        with serving({"/health": {}}) as url:
            (engine,) = try_servers(over(url))
        assert engine.failed and "/bridge/info answers 404" in engine.message

    def test_a_rollout_api_answers_or_there_is_room_for_one(self):
        server = AppThread(build_app(ServerOptions()), port=free_port(), lifespan=True)
        url = server.url
        try:
            (api,) = try_servers(config(source={"kind": "atropos", "url": url}))
        finally:
            server.stop()
        assert api.message == f"{url} is a rollout API (limit 5 s)"
        (api,) = try_servers(config(source={"kind": "atropos", "url": url}))
        assert not api.failed and not api.applies and "`lachesis run` starts" in api.message
        (api,) = try_servers(config(source={"kind": "atropos", "url": url}, services={"api": None}))
        assert api.failed and "does not answer" in api.message

    def test_another_kind_of_server_is_no_rollout_api(self):
        with serving({"/info": {"version": 1}}) as url:
            (api,) = try_servers(config(source={"kind": "atropos", "url": url}))
        assert api.failed and f"what answers at {url} is not a rollout API" in api.message

    @pytest.mark.parametrize(("route", "status", "failed"), [("/v1/models", 200, False), ("/", 404, True)])
    def test_a_teacher_is_asked_too(self, route: str, status: int, failed: bool):
        with serving({route: {"data": []}}) as url:
            (teacher,) = try_servers(config(algorithm={"teacher": {"kind": "url", "url": f"{url}/v1"}}))
        assert teacher.subject == "teacher" and teacher.failed is failed
        assert ("answers (limit 5 s)" if status == 200 else f"/v1/models answers {status}") in teacher.message

    def test_a_teacher_that_wants_its_key_is_there(self):
        with serving({"/v1/models": 401}) as url:
            (teacher,) = try_servers(config(algorithm={"teacher": {"kind": "url", "url": url}}))
        assert not teacher.failed

    def test_without_servers_there_is_nothing_to_ask(self):
        assert [(check.subject, check.applies) for check in try_servers(config())] == [("servers", False)]


class TestPorts:
    def test_of_the_engine_that_a_run_starts(self):
        engine, bridge = {"kind": "embedded_server", "port": free_port()}, {"kind": "reload"}
        (free,) = try_ports(config(engine=engine, bridge=bridge))
        assert not free.failed and free.subject == f"port 127.0.0.1:{engine['port']}"
        with socket.create_server(("127.0.0.1", engine["port"])):
            (taken,) = try_ports(config(engine=engine, bridge=bridge))
        assert taken.failed and f"port {engine['port']} of 127.0.0.1 is taken by" in taken.message
        assert "choose another port" in taken.message

    def test_where_trainer_and_engine_meet(self):
        port = free_port()
        sections = {
            "engine": {"kind": "http"},
            "bridge": {"kind": "broadcast", "init_method": f"tcp://127.0.0.1:{port}"},
        }
        (free,) = try_ports(config(**sections))
        assert not free.failed and f"tcp://127.0.0.1:{port} is free (bridge.init_method)" in free.message
        with socket.create_server(("127.0.0.1", port)):
            (taken,) = try_ports(config(**sections))
        assert taken.failed and "cannot listen" in taken.message and "a port that is free" in taken.message

    def test_any_port_will_do_where_none_is_named(self):
        (check,) = try_ports(over("http://127.0.0.1:9001"))
        assert not check.failed and check.message.startswith("tcp://127.0.0.1:0 is free")

    def test_an_engine_in_the_trainers_process_listens_nowhere(self):
        assert [check.applies for check in try_ports(config())] == [False]


def test_addresses_that_cannot_be_found_keep_nothing_else_from_being_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.plugins.checks.doctor.try_transfer", lambda config: Check("other", "tried"))
    found = list(trials(over("file:/nowhere/at/all")))
    assert [check.failed for check in found] == [True, True, False]
    assert "/nowhere/at/all of engine.urls cannot be read" in found[0].message
