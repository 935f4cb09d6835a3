"""Engines of a run: servers that it leaves to the next one, and the trainer's own modules."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lachesis.common.deadline import Deadline
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.config.schema import LachesisConfig
from lachesis.engines.http import control
from lachesis.engines.serving.session import new_session, write_session
from lachesis.run.context import RunPlace
from lachesis.run.engine import build_engine_side, unclaimed_on_error
from lachesis.run.parts import build_policy
from lachesis.train.batch import pack
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.engines.fake_server import FakeServer
from tests.unit.train.drifted import drifted_groups
from tests.waiting import LONG_S


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


def test_what_is_generated_beside_training_is_what_is_generated_alone(tmp_path: Path):
    """Training mode means gradient checkpointing (no cache of keys) and an adapter's dropout, for the same modules."""
    tiny_model("qwen2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = LachesisConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": str(tmp_path), "gradient_checkpointing": True},
            "adapter": {"kind": "lora", "dropout": 0.5},
            "algorithm": {"beta": 0.1},
        }
    )
    bridge = build_engine_side(config, place=RunPlace(tmp_path, tmp_path / "engine.log", "me")).bridge
    policy = bridge.prepare(partial(build_policy, config))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    batch = pack(drifted_groups(policy.transformer), max_tokens=64, share_prefixes=policy.plan.packed)
    asked = [GenerationRequest((5, 6 + i), SamplingParams(48), n=4, seed=i) for i in range(4)]
    alone = bridge.engine.generate(asked, deadline=Deadline("test", LONG_S))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(bridge.engine.generate, asked, deadline=Deadline("test", LONG_S))
        while not beside.done():
            policy.accumulate(batch)
    assert beside.result() == alone
    bridge.close()
