"""An environment of which the rollout API hears nothing is told, and so is an API that is silent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lachesis.plugins.atropos.api.server import ServerOptions, build_app
from lachesis.plugins.atropos.source import pulse as pulse_of_source
from lachesis.plugins.atropos.source.pulse import api_pulses
from lachesis.run import pulse
from lachesis.run.pulse import pulses_felt
from tests.threads import Thread
from tests.unit.plugins.atropos.api.processes import REGISTRATION
from tests.unit.plugins.atropos.environments.servers import client
from tests.waiting import until

HTTP = client("")
ASKED = {"max_token_length": 16, "desired_name": "sums", "weight": 1.0, "group_size": 2}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pulse, pulse_of_source):
        monkeypatch.setattr(module, "SILENCE_S", 0.5)


@pytest.fixture
def api() -> Iterator[Thread]:
    server = Thread(build_app(ServerOptions()), lifespan=True)
    HTTP.post(f"{server.url}/register", json=REGISTRATION).raise_for_status()
    HTTP.get(f"{server.url}/batch").raise_for_status()
    yield server
    server.stop()


@contextmanager
def environment(url: str) -> Iterator[threading.Event]:
    """An environment that asks the API for its queue, as it does several times a second, while the event is set."""
    member: dict[str, Any] = HTTP.post(f"{url}/register-env", json=ASKED).raise_for_status().json()
    runs, over = threading.Event(), threading.Event()

    def ask() -> None:
        while not over.wait(0.05):
            if runs.is_set():
                HTTP.request("GET", f"{url}/status-env", json={"env_id": member["env_id"]}).raise_for_status()

    runs.set()
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield runs
    finally:
        over.set()
        asking.join()


def test_a_silent_environment_is_told_by_its_name_and_so_is_that_it_has_resumed(api: Thread, caplog):
    caplog.set_level(logging.WARNING)
    with environment(api.url) as first, environment(api.url), pulses_felt(lambda: api_pulses(api.url), every_s=0.05):
        time.sleep(1.0)
        assert not caplog.messages
        first.clear()
        until(lambda: caplog.messages)
        assert caplog.messages[0].startswith("the environment sums_0 has not contacted the rollout API for ")
        first.set()
        until(lambda: len(caplog.messages) == 2)
        assert caplog.messages[1].startswith("the environment sums_0 has resumed after ")


def test_an_environment_that_has_said_goodbye_is_not_silent(api: Thread, caplog):
    caplog.set_level(logging.WARNING)
    with environment(api.url) as one, pulses_felt(lambda: api_pulses(api.url), every_s=0.05):
        one.clear()
        HTTP.post(f"{api.url}/disconnect-env", json={"env_id": 0}).raise_for_status()
        time.sleep(1.2)
    assert not caplog.messages


def test_environments_of_an_api_that_was_silent_itself_are_not_told(api: Thread, caplog):
    caplog.set_level(logging.WARNING)
    with environment(api.url), pulses_felt(lambda: api_pulses(api.url), every_s=0.05):
        time.sleep(0.3)
        api.loop.call_soon_threadsafe(time.sleep, 2.0)
        until(lambda: len(caplog.messages) == 2)
        time.sleep(0.8)
    name = f"the rollout API at {api.url}"
    assert caplog.messages[0] == f"{name} has not answered for 0.5 s"
    assert caplog.messages[1].startswith(f"{name} has resumed after ")
    assert len(caplog.messages) == 2
