"""What is stopped or silent is told within five seconds, and so is that it goes on."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from threading import Event

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lachesis.common.deadline import Deadline
from lachesis.run import pulse
from lachesis.run.pulse import FROM_OTHERS, Pulse, pulses_felt, server_pulse
from tests.threads import Thread
from tests.waiting import until

# A server whose main process answers, beside a child that computes.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, child.pid, flush=True)
server.serve_forever()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port, child = map(int, process.stdout.readline().split())
    yield process, f"http://127.0.0.1:{port}/health", child
    for pid in (child, process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("which", ["server", "child"])
def test_a_stopped_process_is_told_with_how_it_goes_on(server, which: str, caplog: pytest.LogCaptureFixture):
    process, url, child = server
    stopped = process.pid if which == "server" else child
    caplog.set_level(logging.WARNING)
    with pulses_felt(lambda: [Pulse("the engine", url, lambda: process.pid)], every_s=0.1):
        time.sleep(0.4)
        assert not caplog.messages
        os.kill(stopped, signal.SIGSTOP)
        since = time.monotonic()
        until(lambda: caplog.messages)
        assert time.monotonic() - since < 5
        assert caplog.messages[0].startswith("the engine is stopped by a signal")
        assert caplog.messages[0].endswith(f"kill -CONT {stopped}")
        os.kill(stopped, signal.SIGCONT)
        until(lambda: any("the engine has resumed after" in message for message in caplog.messages))
    assert len(caplog.messages) == 2


def test_one_that_is_silent_elsewhere_is_told(server, caplog: pytest.LogCaptureFixture, monkeypatch):
    """Nothing is known of its process: it may be on another machine."""
    process, url, _ = server
    monkeypatch.setattr(pulse, "SILENCE_S", 0.5)
    caplog.set_level(logging.WARNING)
    with pulses_felt(lambda: [Pulse("the engine", url, lambda: None)], every_s=0.1):
        time.sleep(0.4)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: "the engine has not answered for 0.5 s" in caplog.messages)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: any("has resumed" in message for message in caplog.messages))
        process.kill()
        process.wait()
        time.sleep(0.5)
    assert len(caplog.messages) == 2, "that it is gone is told by whoever lost a request"


WELL = Pulse("the engine", None, lambda: None)


def test_a_slow_transfer_within_the_process_is_not_told(caplog: pytest.LogCaptureFixture):
    late = Deadline(f"{pulse.TRANSFER} 3 and its proof", 300.0)
    with pulses_felt(list, last_transfer_s=lambda: -pulse.LATE_S, every_s=0.02), late.waiting():
        time.sleep(0.3)
    assert not caplog.messages


def test_a_transfer_that_hangs_is_told_though_the_engine_answers(caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(pulse, "LATE_S", 0.3)
    caplog.set_level(logging.WARNING)
    took: list[float] = []
    with pulses_felt(lambda: [WELL], last_transfer_s=lambda: took[-1] if took else None, every_s=0.02):
        for seconds in (0.001, 0.15, 0.9):  # the first is over before anybody looks
            with Deadline(f"{pulse.TRANSFER} 3 and its proof", 300.0).waiting():
                time.sleep(seconds)
            took.append(seconds)
            time.sleep(0.1)
        until(lambda: any("the transfer has ended" in message for message in caplog.messages))
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("the transfer of weight version 3 and its proof has taken")


@pytest.mark.parametrize("which", ["stopped", "silent", "well"])
def test_a_late_transfer_waits_no_longer_for_what_is_stopped(server, which: str, monkeypatch):
    """Nor, after some more time, for what has been silent, which may be busy."""
    process, url, _ = server
    monkeypatch.setattr(pulse, "SILENCE_S", 0.3)
    monkeypatch.setattr(pulse, "GIVEN_UP_S", 0.6)
    monkeypatch.setattr(pulse, "LATE_S", 0.3)
    given_up: list[str] = []
    one = Pulse("the engine", url, lambda: process.pid if which == "stopped" else None, given_up.append)
    with pulses_felt(lambda: [one], last_transfer_s=lambda: 0.1, every_s=0.05):
        time.sleep(0.4)
        if which != "well":
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.0)
        assert not given_up, "no transfer is late"
        with Deadline(f"{pulse.TRANSFER} 3 and its proof", 300.0).waiting():
            if which == "well":
                time.sleep(1.0)
            else:
                until(lambda: given_up)
        os.kill(process.pid, signal.SIGCONT)
    said = {"stopped": "it is stopped by a signal", "silent": "it has not answered for 0.3 s"}
    assert set(given_up) == ({said[which]} if which in said else set())


def test_the_first_transfer_of_a_run_is_told_in_five_seconds_too(caplog: pytest.LogCaptureFixture):
    assert pulse.FIRST_TRANSFER_S + pulse.LOOK_S / 2 <= 5
    caplog.set_level(logging.WARNING)
    with pulses_felt(lambda: [WELL]), Deadline(f"{pulse.TRANSFER} 0 and its proof", 300.0).waiting():
        began = time.monotonic()
        until(lambda: caplog.messages)
        assert time.monotonic() - began < 6.5
    assert "has taken" in caplog.messages[0] and "the first may take long" in caplog.messages[0]


def test_a_question_is_open_for_less_than_five_seconds_and_the_pause_before_it():
    assert pulse.LOOK_S + pulse.SILENCE_S < 5


@pytest.fixture
def engine() -> Iterator[tuple[dict[str, object], str, list[dict[str, object]]]]:
    """What an engine says of itself, which may be changed, where, and what it said at each look."""
    said = {"generated_tokens": 7, "paused": False, "sleeping": False}

    async def info(request: Request) -> JSONResponse:
        looks.append(said.copy())
        return JSONResponse(said)

    looks: list[dict[str, object]] = []
    server = Thread(Starlette(routes=[Route("/bridge/info", info)]))
    yield said, server.url, looks
    server.stop()


@pytest.mark.parametrize("waits", ["its requests", "an environment's"])
def test_an_engine_that_answers_and_generates_nothing_of_what_the_run_waits_for(
    engine, waits: str, caplog: pytest.LogCaptureFixture, monkeypatch
):
    said, url, looks = engine
    monkeypatch.setattr(pulse, "SILENCE_S", 0.4)
    caplog.set_level(logging.WARNING)
    asked = Event()
    wait = Deadline(f"the wait for a batch of 8 {FROM_OTHERS} http://x", None)
    felt = pulses_felt(lambda: [server_pulse(url, has_requests=asked.is_set)], every_s=0.05)
    with felt, wait.waiting() if waits == "an environment's" else nullcontext():
        if waits == "its requests":
            asked.set()
        else:  # an environment that has yet to ask for anything is not the engine's fault
            time.sleep(0.8)
            assert looks and not caplog.messages
            said["generated_tokens"] = 7.5
        until(lambda: caplog.messages)
        trouble = "answers but has generated nothing for 0.4 s, and the run waits for it"
        assert caplog.messages == [f"the engine at {url} {trouble}"]
        said["generated_tokens"] = 8
        until(lambda: len(caplog.messages) == 2)
        assert "has resumed after" in caplog.messages[1]
        until(lambda: len(caplog.messages) == 3)
        assert caplog.messages[2] == caplog.messages[0].replace("0.4", "0.8"), "later, as that one had ended by itself"


@pytest.mark.parametrize("why", ["paused", "sleeping", "transfer", "nothing is asked", "not counted"])
def test_an_engine_that_has_a_reason_to_generate_nothing(
    engine, why: str, caplog: pytest.LogCaptureFixture, monkeypatch
):
    said, url, _ = engine
    monkeypatch.setattr(pulse, "SILENCE_S", 0.2)
    monkeypatch.setattr(pulse, "FIRST_TRANSFER_S", 300.0)
    caplog.set_level(logging.WARNING)
    said.update({why: True} if why in said else {})
    said.update({"generated_tokens": None} if why == "not counted" else {})
    transfer = Deadline(f"{pulse.TRANSFER} 3", None).waiting() if why == "transfer" else nullcontext()
    is_asked = why != "nothing is asked"
    with transfer, pulses_felt(lambda: [server_pulse(url, has_requests=lambda: is_asked)], every_s=0.02):
        time.sleep(0.8)
    assert not caplog.messages


def test_what_is_not_up_yet_is_not_silent(caplog: pytest.LogCaptureFixture):
    with pulses_felt(lambda: [Pulse("the engine", "http://127.0.0.1:1/health", lambda: 2**30)], every_s=0.05):
        time.sleep(0.3)
    assert not caplog.messages
