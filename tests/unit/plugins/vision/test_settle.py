"""What a run with images settles, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_config
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.vision.settle import settle

CONFIG = """
run: {steps: 1}
model: {path: model}
data: {path: data.jsonl}
rewards: {functions: [exact_match]}
"""


def config(directory: Path, *overrides: str) -> LachesisConfig:
    path = directory / "config.yaml"
    path.write_text(CONFIG)
    return load_config(path, overrides=("engine.kind=embedded", *overrides)).config


@pytest.mark.parametrize(("asked", "vision"), [((), "frozen"), (("model.vision=trained",), "trained")])
def test_the_tower_is_frozen_unless_asked_otherwise(tmp_path: Path, asked: tuple[str, ...], vision: str):
    found = settle(config(tmp_path, *asked), [], ranks=1)
    assert found.model.vision == vision
    assert found.model.sees_images


@pytest.mark.parametrize(
    ("overrides", "ranks", "named", "remedy"),
    [
        (("engine.kind=embedded_server", "bridge.kind=broadcast"), 1, "engine.kind is embedded_server", "vllm"),
        ((), 2, "2 ranks train together", "--nproc-per-node 1"),
        (("algorithm.router_replay=true",), 1, "router_replay", "set algorithm.router_replay: false"),
        (("model.packing=packed",), 1, "a row for each sequence", "remove model.packing"),
        (("model.vision=trained", "adapter.kind=lora"), 1, "adapters exclude it", "set model.vision: frozen"),
        (("model.vision=trained", "model.train_layers=[0]"), 1, "model.train_layers", "remove one of the two"),
    ],
)
def test_what_does_not_take_images_is_named(
    tmp_path: Path, overrides: tuple[str, ...], ranks: int, named: str, remedy: str
):
    with pytest.raises(ConfigError, match=named) as raised:
        settle(config(tmp_path, *overrides), [], ranks=ranks)
    assert remedy in raised.value.remedy
