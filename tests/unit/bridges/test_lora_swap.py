"""Saving adapters and swapping them into running servers, and every stage failing."""

from __future__ import annotations

import errno
import json
import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lachesis.bridges.model_files import adapter_config, save_adapter, write_safetensors
from lachesis.bridges.saved import AdapterWriter, SavedBridge, VersionedDirectories, load_adapter
from lachesis.bridges.sent_weights import lora_tensors
from lachesis.common.errors import EngineError, ModelError, StaleWeights
from lachesis.config.schema import LoraSwapBridgeConfig
from lachesis.engines.fleet import State
from lachesis.engines.serving.adapter_files import read_adapter
from lachesis.engines.serving.backend import Refused
from tests.tiny import tiny_model
from tests.unit.bridges.fake_engine import (
    FakeHttpEngine,
    FakePolicy,
    FakeServer,
    drop_one,
    keep_old,
    read,
    servers_of,
    swap_two,
)


def build(tmp_path: Path, *servers: FakeServer, **options: Any) -> tuple[SavedBridge[FakePolicy], FakePolicy]:
    options = {"keep_last": 2} | options
    bridge: SavedBridge[FakePolicy] = SavedBridge(
        servers_of(FakeHttpEngine(*(servers or (FakeServer(),))), options),
        capabilities=LoraSwapBridgeConfig.capabilities,
        directory=tmp_path / "adapters",
        save=AdapterWriter(
            tensors=lambda policy: lora_tensors(policy.model), config=lambda policy: adapter_config(policy.model)
        ),
        load=load_adapter,
        done="[LORA] ✓ Hot-swapped adapter: version %d in %.3f s",
        **options,
    )
    return bridge, bridge.prepare(lambda: FakePolicy(lora=True))


def update(bridge: SavedBridge[FakePolicy], policy: FakePolicy, version: int) -> None:
    with bridge.update_to(version):
        policy.step()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_every_server_serves_the_new_adapter_after_an_update(tmp_path, caplog):
    servers = FakeServer(), FakeServer(number=1)
    bridge, policy = build(tmp_path, *servers)
    with caplog.at_level(logging.INFO):
        bridge.sync(0)
        update(bridge, policy, 1)
    for server in servers:
        assert server.version == 1
        assert server.tensors.keys() == lora_tensors(policy.model).keys()
        assert read(server.tensors) == read(lora_tensors(policy.model))
        assert server.served == tmp_path / "adapters" / "v1"
    assert caplog.text.count("[LORA] ✓ Hot-swapped adapter") == 2


def test_the_saved_adapter_is_what_peft_saves(tmp_path):
    model = FakePolicy(lora=True).model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "peft")
    (tmp_path / "ours").mkdir()
    save_adapter(tmp_path / "ours", tensors=lora_tensors(model), config=adapter_config(model))
    theirs, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "ours"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in theirs.items())
    with safe_open(tmp_path / "ours" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("peft", "ours")]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]
    assert read_adapter(tmp_path / "ours", max_rank=4).spec.r == 4


def test_tensors_of_several_dtypes_shapes_and_layouts_are_written(tmp_path):
    tensors = {
        "b": torch.randn(3, 4).T,
        "a": torch.randn(5).to(torch.bfloat16),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "half": torch.randn(7, 2).half()[::2],
        "empty": torch.zeros(0, 3),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    write_safetensors(tmp_path / "nothing.safetensors", {})
    assert load_file(tmp_path / "nothing.safetensors") == {}


def test_old_adapters_are_deleted_and_only_those(tmp_path):
    bridge, policy = build(tmp_path)
    (tmp_path / "adapters" / ".tmp-v7").mkdir(parents=True)  # of a run that was killed
    (tmp_path / "adapters" / "notes").mkdir()
    for version in range(4):
        update(bridge, policy, version)
    assert names(tmp_path / "adapters") == ["notes", "v2", "v3"]
    update(bridge, policy, 1)  # back to an earlier step: the latest written stay
    assert names(tmp_path / "adapters") == ["notes", "v1", "v3"]


def test_a_version_that_is_written_again_is_replaced(tmp_path):
    bridge, policy = build(tmp_path)
    bridge.sync(3)
    policy.step()
    bridge.sync(3)
    (server,) = bridge.engine.controls
    assert read(server.tensors) == read(lora_tensors(policy.model))  # type: ignore[attr-defined]
    assert names(tmp_path / "adapters") == ["v3"]


def test_only_every_nth_version_travels(tmp_path):
    server = FakeServer()
    bridge, policy = build(tmp_path, server, every_steps=3)
    for version in range(1, 8):
        update(bridge, policy, version)
    assert server.calls.count("load_adapter") == 2
    assert server.version == 6
    bridge.sync(7)
    assert server.version == 7


def test_a_refused_swap_raises_and_what_is_served_stays(tmp_path):
    server = FakeServer()
    bridge, policy = build(tmp_path, server, keep_last=1)
    bridge.sync(0)
    old = read(server.tensors)
    for version in (1, 2):
        server.faults["load_adapter"] = Refused("rank 4 is above 2", status=422, remedy="start it with a larger rank")
        with pytest.raises(Refused, match="rank 4 is above 2"):
            update(bridge, policy, version)
        assert (server.version, read(server.tensors)) == (0, old)
        assert server.served is not None
        assert (server.served / "adapter_config.json").exists()
    update(bridge, policy, 3)
    assert server.version == 3
    assert names(tmp_path / "adapters") == ["v3"]


def test_one_of_two_servers_that_cannot_load_it_is_dead_until_the_next_update(tmp_path):
    servers = FakeServer(), FakeServer(number=1)
    bridge, policy = build(tmp_path, *servers)
    bridge.sync(0)
    servers[1].faults["load_adapter"] = EngineError("the adapter cannot be read")
    update(bridge, policy, 1)
    assert [server.version for server in servers] == [1, 0]
    assert bridge.engine.fleet.state(servers[1].url) is State.DEAD
    assert bridge.engine.fleet.reason(servers[1].url) == "the adapter cannot be read"
    update(bridge, policy, 2)
    assert [server.version for server in servers] == [2, 2]


def test_where_no_server_can_load_it_that_is_raised_and_none_is_dead(tmp_path):
    servers = FakeServer(), FakeServer(number=1)
    bridge, policy = build(tmp_path, *servers)
    bridge.sync(0)
    for server in servers:
        server.faults["load_adapter"] = EngineError("the adapter cannot be read")
    with pytest.raises(EngineError, match="cannot be read"):
        update(bridge, policy, 1)
    assert len(bridge.engine.living) == 2
    assert names(tmp_path / "adapters") == ["v0", "v1"], "either may be in use"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write beyond ``size`` bytes in a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_an_adapter_that_cannot_be_written_whole_is_never_loaded(tmp_path):
    server = FakeServer()
    bridge, policy = build(tmp_path, server)
    bridge.sync(0)
    with files_of_at_most(3000), pytest.raises(EngineError, match=r"weight version 1 cannot be written to .*v1"):
        update(bridge, policy, 1)
    assert server.calls.count("load_adapter") == 1
    assert names(tmp_path / "adapters") == ["v0"]
    update(bridge, policy, 1)
    assert server.version == 1


def test_a_full_disk_is_named(tmp_path):
    directories = VersionedDirectories(tmp_path, keep_last=1)
    with pytest.raises(EngineError, match="no space is left") as caught, directories.writing(5):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "bridge.keep_last" in caught.value.remedy
    assert names(tmp_path) == []


def test_a_place_that_is_no_directory_is_an_error_in_words(tmp_path):
    (tmp_path / "adapters").write_text("in the way")
    bridge, _ = build(tmp_path)
    with pytest.raises(EngineError, match="weight version 0 cannot be written"):
        bridge.sync(0)


@pytest.mark.parametrize("corruption", ["drop one", "swap two", "keep old"])
def test_what_does_not_arrive_is_stale_weights(tmp_path, corruption: str):
    server = FakeServer()
    bridge, policy = build(tmp_path, server)
    bridge.sync(0)
    server.corrupt = {"drop one": drop_one, "swap two": swap_two, "keep old": keep_old(server)}[corruption]
    with pytest.raises(StaleWeights):
        update(bridge, policy, 1)
    server.corrupt = dict
    update(bridge, policy, 2)


def test_an_adapter_config_needs_an_adapter():
    with pytest.raises(ModelError, match="PEFT library required: Qwen2ForCausalLM has no adapter"):
        adapter_config(tiny_model())


def test_closing_may_be_repeated(tmp_path):
    bridge, _ = build(tmp_path)
    bridge.sync(0)
    bridge.close()
    bridge.close()
    assert names(tmp_path / "adapters") == ["v0"], "the engine may still serve it"
