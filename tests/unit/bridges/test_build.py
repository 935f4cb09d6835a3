from __future__ import annotations

from typing import Any

import pytest
import torch

from lachesis.bridges.build import channel_backend, sleep_level
from lachesis.config.schema import BroadcastBridgeConfig, LachesisConfig


def config(bridge: dict[str, Any], **engine: Any) -> LachesisConfig:
    tree = {"run": {"steps": 1}, "model": {"path": "m"}, "engine": {"kind": "vllm", **engine}, "bridge": bridge}
    return LachesisConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("bridge", "every_steps", "level"),
    [
        ({"kind": "broadcast"}, 1, 2),
        ({"kind": "reload"}, 1, 2),
        ({"kind": "broadcast"}, 2, 1),
        ({"kind": "lora_only"}, 1, 1),
        ({"kind": "lora_nccl"}, 1, 1),
    ],
    ids=["all come anew", "by a file", "not after each step", "an adapter alone comes", "over a channel"],
)
def test_an_engine_keeps_the_weights_that_do_not_come_anew(bridge: dict[str, Any], every_steps: int, level: int):
    bridge = bridge | {"every_steps": every_steps}
    assert sleep_level(config(bridge, enable_sleep_mode=True)) == level
    assert sleep_level(config(bridge)) == 0


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ({}, "ipc"),
        ({"devices": "1"}, "nccl"),
        ({"devices": "1,2", "data_parallel_size": 2}, "nccl"),
        ({"devices": "1, 1", "data_parallel_size": 2}, "gloo"),
    ],
    ids=["on the trainer's GPU", "on one of its own", "one each", "two on one, of which NCCL takes one"],
)
def test_how_tensors_travel_follows_from_where_servers_are(
    engine: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lachesis.bridges.build.resolve_device", lambda name: torch.device("cuda"))
    bridge = BroadcastBridgeConfig()
    assert channel_backend(config({"kind": "broadcast"}, **engine), bridge) == backend
    assert (
        channel_backend(config({"kind": "broadcast"}, **engine), bridge.model_copy(update={"transport": "gloo"}))
        == "gloo"
    )
