"""Checkpoints on which an engine is restarted, or which it loads while it runs."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lachesis.bridges.external import OwnedEngine
from lachesis.bridges.model_files import save_companions, write_checkpoint
from lachesis.bridges.saved import CheckpointFiles, SavedBridge, load_checkpoint, started_on_it
from lachesis.bridges.sent_weights import full_weights
from lachesis.common.errors import EngineError, StaleWeights
from lachesis.config.schema import ReloadBridgeConfig, RestartBridgeConfig
from lachesis.engines.serving.backend import Refused
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.bridges.fake_engine import (
    FakeHttpEngine,
    FakePolicy,
    FakeProcess,
    FakeServer,
    MergedPolicy,
    drop_one,
    read,
    servers_of,
    swap_two,
)


def merged(policy: FakePolicy) -> dict[str, Tensor]:
    return dict(full_weights(policy.model))


def companions(policy: FakePolicy, directory: Path) -> None:
    (directory / "config.json").write_text("{}")


class Owned(OwnedEngine):
    """Over a fake process, whose end shows at once: none is waited for after a failure."""

    def died(self, *, within_s: float = 0.0) -> bool:
        return super().died(within_s=within_s)


class Built:
    def __init__(
        self, tmp_path: Path, *, restart: bool, lora: bool = False, weights: Any = None, **options: Any
    ) -> None:
        self.server = FakeServer()
        self.process = FakeProcess(self.server)
        self.directory = tmp_path / "exports"
        engine = FakeHttpEngine(self.server)
        owned = Owned(engine=engine, processes=[self.process], owner="run 7")  # type: ignore[list-item]
        options |= (
            {
                "capabilities": RestartBridgeConfig.capabilities,
                "owned": owned,
                "load": started_on_it,
                "command": lambda _, path: ("serve", str(path)),
            }
            if restart
            else {"capabilities": ReloadBridgeConfig.capabilities, "load": load_checkpoint}
        )
        self.bridge: SavedBridge[FakePolicy] = SavedBridge(
            servers_of(engine, options),
            directory=self.directory,
            keep_last=1,
            save=CheckpointFiles(weights=weights or (lambda policy: full_weights(policy.model)), companions=companions),
            done="[CHECKPOINT] Engine serves version %d after %.1f s",
            **options,
        )
        self.policy: FakePolicy = self.bridge.prepare(lambda: MergedPolicy(lora=lora))

    def update(self, version: int) -> None:
        with self.bridge.update_to(version):
            self.policy.step()

    def exports(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture(params=[True, False], ids=["none", "reload"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return partial(Built, tmp_path, restart=request.param)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "merged"])
def test_the_engine_serves_each_new_checkpoint(build, lora: bool):
    built = build(lora=lora)
    built.bridge.sync(0)
    for version in (1, 2):
        built.update(version)
        assert built.server.version == version
        assert read(built.server.tensors) == read(merged(built.policy))
    assert built.exports() == ["v2"]
    assert built.server.served == built.directory / "v2"


def test_a_restarted_engine_is_claimed_anew_and_started_once_a_transfer(tmp_path):
    built = Built(tmp_path, restart=True, every_steps=3)
    built.bridge.sync(0)
    for version in range(1, 7):
        built.update(version)
    assert built.process.starts == 3
    assert built.server.owner == "run 7"
    assert built.process.command == ("serve", str(built.directory / "v6"))


def test_an_engine_already_running_on_the_base_is_restarted_on_the_first_checkpoint(tmp_path):
    built = Built(tmp_path, restart=True)
    built.process.launch()
    built.bridge.sync(0)
    assert built.process.starts == 2


def test_the_engine_runs_while_the_checkpoint_is_written(tmp_path):
    running: list[bool] = []

    def weights(policy: FakePolicy) -> Iterator[tuple[str, Tensor]]:
        running.append(built.process.pid is not None)
        return full_weights(policy.model)

    built = Built(tmp_path, restart=True, weights=weights)
    built.bridge.sync(0)
    built.update(1)
    assert running == [False, True]


def test_the_one_that_is_served_is_kept_when_its_successor_fails(build):
    built = build()
    built.bridge.sync(0)
    call = "claim" if built.bridge.capabilities.owns_engine else "reload"
    for version in (1, 2):
        built.server.faults[call] = Refused("not now", status=409)
        with pytest.raises(Refused, match="not now"):
            built.update(version)
        assert built.server.served is not None
        assert (built.server.served / "config.json").exists()
    built.update(3)
    assert built.exports() == ["v3"]


def test_a_checkpoint_that_cannot_be_written_is_never_served(build):
    built = build()
    built.bridge.sync(0)
    (built.directory / ".tmp-v1").write_text("in the way")
    starts = built.process.starts
    with pytest.raises(EngineError, match="weight version 1 cannot be written"):
        built.update(1)
    assert built.process.starts == starts
    assert built.server.version == 0
    assert built.server.served == built.directory / "v0"


def test_an_engine_that_does_not_come_up_raises_and_the_next_transfer_starts_it(tmp_path):
    built = Built(tmp_path, restart=True)
    built.bridge.sync(0)
    built.process.dies_at_start = 2
    with pytest.raises(EngineError, match=r"died a second time with weight version 1: .* out of memory"):
        built.update(1)
    built.update(2)
    assert read(built.server.tensors) == read(merged(built.policy))


def test_an_engine_that_dies_is_started_again_once_with_the_same_weights(tmp_path, caplog):
    built = Built(tmp_path, restart=True)
    built.bridge.sync(0)
    built.process.dies_at_start = 1
    built.update(1)
    assert (built.server.version, built.server.owner) == (1, "run 7")
    assert read(built.server.tensors) == read(merged(built.policy))
    assert caplog.text.count("the engine died; restarting it with weight version 1") == 1


@pytest.mark.parametrize("corruption", ["drop one", "swap two", "keep old"])
def test_what_does_not_arrive_is_stale_weights(build, corruption: str):
    built = build()
    built.bridge.sync(0)
    old = dict(built.server.tensors)
    faults = {"drop one": drop_one, "swap two": swap_two, "keep old": lambda _: old}
    built.server.corrupt = faults[corruption]
    with pytest.raises(StaleWeights):
        built.update(1)


def test_closing_stops_what_the_bridge_started_and_may_be_repeated(tmp_path):
    built = Built(tmp_path, restart=True)
    built.bridge.sync(0)
    built.bridge.close()
    built.bridge.close()
    assert built.process.pid is None


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 30])
def test_transformers_loads_a_checkpoint_however_it_is_cut(tmp_path, shard_bytes: int):
    model, tokenizer = tiny_model("qwen2", tie_word_embeddings=True).to(torch.bfloat16), tiny_tokenizer()
    write_checkpoint(tmp_path, full_weights(model), shard_bytes=shard_bytes)
    save_companions(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert dict(full_weights(loaded)).keys() == dict(full_weights(model)).keys()
    for name, tensor in full_weights(loaded):
        assert torch.equal(tensor, dict(full_weights(model))[name]), name
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["Qwen2ForCausalLM"]
    assert AutoTokenizer.from_pretrained(tmp_path).encode("12") == tokenizer.encode("12")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in full_weights(model))
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert (len(files) > 1) == (shard_bytes < 1 << 30)
    number = len(files)
    several = {f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)}
    assert files == ({"model.safetensors"} if number == 1 else several)


def test_at_most_one_files_worth_is_held(tmp_path):
    alive: list[str] = []
    most = 0

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i in range(10):
            tensor = torch.full((100,), float(i))
            name = f"t{i}"
            alive.append(name)
            weakref.finalize(tensor, alive.remove, name)
            most = max(most, len(alive))
            yield name, tensor
            del tensor

    write_checkpoint(tmp_path, weights(), shard_bytes=800)
    assert most <= 4  # two in the file, the one that did not fit, and the loop's own
