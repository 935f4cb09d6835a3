from __future__ import annotations

from typing import Any

import pytest

from lachesis.bridges.build import sleep_level
from lachesis.config.schema import LachesisConfig


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
