"""What a bridge does when an engine of the run's own dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.bridges.adapters import adapter_config
from lachesis.bridges.extract import lora_tensors
from lachesis.bridges.owned import OwnedEngine
from lachesis.bridges.saved import AdapterFiles, SavedBridge, load_adapter
from lachesis.common.errors import EngineError
from lachesis.config.schema import LoraSwapBridgeConfig
from tests.unit.bridges.fake_engine import (
    FakeHttpEngine,
    FakePolicy,
    FakeProcess,
    FakeServer,
    build_proof,
    read,
)


class Built:
    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.server = FakeServer()
        self.process = FakeProcess(self.server)
        self.process.launch()
        engine = FakeHttpEngine(self.server)
        self.bridge: SavedBridge[FakePolicy] = SavedBridge(
            capabilities=LoraSwapBridgeConfig.capabilities,
            engine=engine,
            directory=tmp_path / "adapters",
            keep_last=1,
            save=AdapterFiles(
                tensors=lambda policy: lora_tensors(policy.model), config=lambda policy: adapter_config(policy.model)
            ),
            load=load_adapter,
            done="%d in %.3f s",
            proof_builder=build_proof,
            owned=OwnedEngine(engine=engine, processes=[self.process], owner="run 7"),  # type: ignore[list-item]
            **options,
        )
        self.policy = self.bridge.prepare(lambda: FakePolicy(lora=True))
        self.bridge.sync(0)
        self.calls = 0

    def call(self) -> str:
        """What an engine is asked; a dead one does not answer."""
        self.calls += 1
        if self.process.pid is None:
            raise EngineError("the engine does not answer")
        return "answer"


def test_a_call_in_which_it_dies_is_made_again_once_it_serves_the_same_weights(tmp_path):
    built = Built(tmp_path)
    built.process.stop()
    assert built.bridge.retry(built.call) == "answer"
    assert (built.calls, built.process.starts) == (2, 2)
    assert (built.server.version, built.server.owner) == (0, "run 7")
    assert read(built.server.tensors) == read(lora_tensors(built.policy.model))


def test_it_is_started_again_once_for_each_version(tmp_path):
    built = Built(tmp_path)
    built.process.stop()
    built.bridge.retry(built.call)
    built.process.stop()
    with pytest.raises(EngineError, match="died a second time with weight version 0: the engine does not answer"):
        built.bridge.retry(built.call)


def test_an_error_of_one_that_lives_is_passed_on(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OwnedEngine.died, "__kwdefaults__", {"within_s": 0.0})
    built = Built(tmp_path)

    def refuse() -> None:
        raise EngineError("no such prompt")

    with pytest.raises(EngineError, match="no such prompt"):
        built.bridge.retry(refuse)
    assert built.process.starts == 1


def test_weights_in_its_memory_died_with_it(tmp_path):
    built = Built(tmp_path, trains_in_engine=True)
    built.process.stop()
    with pytest.raises(EngineError, match="the weights in its memory with it: the engine does not") as raised:
        built.bridge.retry(built.call)
    assert "--resume" in raised.value.remedy
