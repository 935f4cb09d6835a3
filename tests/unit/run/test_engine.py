"""A run that fails before it changed anything leaves its servers to the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.config.schema import LachesisConfig
from lachesis.engines.http import control
from lachesis.engines.serving.session import new_session, write_session
from lachesis.run.engine import unclaimed_on_error
from tests.unit.engines.fake_server import FakeServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path))
    fake = FakeServer()
    write_session(new_session(host="127.0.0.1", port=fake.port, token="secret"))
    yield fake
    fake.stop()


def over(server: FakeServer, **engine: Any) -> LachesisConfig:
    return LachesisConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "model"},
            "engine": {"kind": "http", "urls": [server.url]} | engine,
            "bridge": {"kind": "broadcast"},
        }
    )


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_was_not_built_gives_its_claim_back(server: FakeServer, error: type[BaseException]):
    server.state.owner = "this-run"
    with pytest.raises(error), unclaimed_on_error(over(server), owner="this-run", claimed_before=False):
        raise error
    assert server.state.owner is None


def test_a_run_that_was_built_keeps_it(server: FakeServer):
    server.state.owner = "this-run"
    with unclaimed_on_error(over(server), owner="this-run", claimed_before=False):
        pass
    assert server.state.owner == "this-run"


@pytest.mark.parametrize(
    ("engine", "owner", "claimed_before"),
    [({}, "this-run", True), ({"takeover": True}, "this-run", False), ({}, "other-run", False)],
    ids=["it had weights there", "it took the engine over", "another run has it"],
)
def test_engines_with_weights_of_a_run_stay_claimed(
    server: FakeServer, engine: dict[str, Any], owner: str, claimed_before: bool
):
    server.state.owner = owner
    config = over(server, **engine)
    with pytest.raises(ValueError), unclaimed_on_error(config, owner="this-run", claimed_before=claimed_before):
        raise ValueError
    assert server.state.owner == owner


def test_a_server_that_is_gone_does_not_hide_the_error(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "CONNECT_RETRIES", 1)  # before the second time httpx waits half a second
    config = over(server)
    server.stop()
    with pytest.raises(ValueError, match="cause"), unclaimed_on_error(config, owner="a", claimed_before=False):
        raise ValueError("cause")
