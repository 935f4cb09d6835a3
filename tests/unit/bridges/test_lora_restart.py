"""Restarting an engine with each new adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.bridges.external import OwnedEngine
from lachesis.bridges.extract import lora_tensors
from lachesis.bridges.model_files import adapter_config
from lachesis.bridges.saved import AdapterWriter, SavedBridge, load_adapter
from lachesis.common.errors import EngineError, StaleWeights
from lachesis.config.schema import LoraRestartBridgeConfig
from lachesis.engines.serving.backend import Refused
from tests.unit.bridges.fake_engine import (
    FakeHttpEngine,
    FakePolicy,
    FakeProcess,
    FakeServer,
    keep_old,
    read,
    servers_of,
)


@pytest.fixture(autouse=True)
def _no_wait_for_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnedEngine.died, "__kwdefaults__", {"within_s": 0.0})


class Built:
    def __init__(self, tmp_path: Path, *, servers: int = 1, **options: Any) -> None:
        self.servers = [FakeServer(number=i) for i in range(servers)]
        self.processes = [FakeProcess(server) for server in self.servers]
        engine = FakeHttpEngine(*self.servers)
        options["owned"] = OwnedEngine(engine=engine, processes=self.processes, owner="run 7")  # type: ignore[arg-type]
        self.directory = tmp_path / "adapters"
        self.bridge: SavedBridge[FakePolicy] = SavedBridge(
            servers_of(engine, options),
            capabilities=LoraRestartBridgeConfig.capabilities,
            directory=self.directory,
            keep_last=1,
            save=AdapterWriter(
                tensors=lambda policy: lora_tensors(policy.model), config=lambda policy: adapter_config(policy.model)
            ),
            load=load_adapter,
            done="[LORA] Engine restarted with version %d in %.1f s",
            **options,
        )
        self.policy = self.bridge.prepare(lambda: FakePolicy(lora=True))

    @property
    def server(self) -> FakeServer:
        return self.servers[0]

    @property
    def process(self) -> FakeProcess:
        return self.processes[0]

    def update(self, version: int) -> None:
        with self.bridge.update_to(version):
            self.policy.step()

    def served_by_all(self) -> bool:
        expected = read(lora_tensors(self.policy.model))
        return all(read(server.tensors) == expected for server in self.servers)


def test_the_engine_is_started_restarted_and_claimed_with_each_transfer(tmp_path):
    built = Built(tmp_path, servers=2, every_steps=2)
    built.bridge.sync(0)
    assert [process.starts for process in built.processes] == [1, 1]
    built.update(1)
    assert [process.starts for process in built.processes] == [1, 1]
    built.update(2)
    assert [process.starts for process in built.processes] == [2, 2]
    assert built.served_by_all()
    for server in built.servers:
        assert (server.version, server.owner) == (2, "run 7")
    assert built.bridge.last_report is not None
    assert built.bridge.last_report.canary_error == 0.0
    assert [path.name for path in built.directory.iterdir()] == ["v2"]


def test_an_engine_that_was_just_started_is_not_restarted_at_first(tmp_path):
    built = Built(tmp_path)
    built.process.launch()
    built.bridge.sync(0)
    assert built.process.starts == 1
    built.update(1)
    assert built.process.starts == 2
    assert built.served_by_all()


def test_an_engine_that_does_not_come_up_again_raises_with_its_log(tmp_path):
    built = Built(tmp_path)
    built.bridge.sync(0)
    built.process.dies_at_start = 2
    with pytest.raises(EngineError, match=r"died a second time with weight version 1: .* out of memory"):
        built.update(1)
    built.update(2)
    assert built.served_by_all()


def test_an_adapter_that_cannot_be_saved_leaves_the_engine_running(tmp_path):
    built = Built(tmp_path)
    built.bridge.sync(0)
    (built.directory / ".tmp-v1").write_text("in the way")
    pid = built.process.pid
    with pytest.raises(EngineError, match="weight version 1 cannot be written"):
        built.update(1)
    assert built.process.pid == pid
    assert built.server.version == 0


def test_a_refused_adapter_or_claim_raises(tmp_path):
    built = Built(tmp_path)
    for call in ("claim", "load_adapter"):
        built.server.faults[call] = Refused(f"{call} is refused", status=409)
        with pytest.raises(Refused, match=f"{call} is refused"):
            built.bridge.sync(0)
    built.bridge.sync(0)
    assert built.served_by_all()


def test_an_engine_that_starts_without_the_adapter_is_stale(tmp_path):
    built = Built(tmp_path)
    built.bridge.sync(0)
    built.server.corrupt = keep_old(built.server)
    with pytest.raises(StaleWeights):
        built.update(1)


def test_closing_stops_the_engine_and_may_be_repeated(tmp_path):
    built = Built(tmp_path)
    built.bridge.sync(0)
    built.bridge.close()
    built.bridge.close()
    assert built.process.pid is None
