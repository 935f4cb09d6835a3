"""Earlier spellings of our keys: translated with a note, or refused with what to write in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.document import to_yaml
from lachesis.config.load import LoadedConfig, load_config

LEAST = {
    "run": {"steps": 1},
    "model": {"path": "a"},
    "data": {"path": "a"},
    "rewards": {"functions": ["a.b"]},
}


def load(directory: Path, *overrides: str, **sections: Any) -> LoadedConfig:
    path = directory / "config.yaml"
    merged = {name: LEAST.get(name, {}) | sections.get(name, {}) for name in (*LEAST, *sections)}
    path.write_text(to_yaml(merged))
    return load_config(path, overrides=overrides)


def test_luspo_is_grpo_with_sums(tmp_path: Path):
    loaded = load(tmp_path, algorithm={"loss_type": "luspo"})
    algorithm = loaded.config.algorithm
    assert (algorithm.loss_type, algorithm.normalization) == ("grpo", "sequence_sum")
    assert "normalization: sequence_sum" in loaded.findings[0].message


def test_vespo_is_refused_with_the_example(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"write algorithm\.loss: vespo\.py:vespo") as caught:
        load(tmp_path, "algorithm.loss_type=vespo")
    assert "expected" not in str(caught.value), "one line says it"


def test_a_run_directory_of_before_still_loads(tmp_path: Path):
    loaded = load(tmp_path, algorithm={"loss_type": "sapo", "vespo_k_pos": 2.0, "vespo_lambda_neg": 2.0})
    assert loaded.config.algorithm.loss_type == "sapo"
    assert loaded.findings == ()


def test_bubblewrap_is_the_wall_of_namespaces(tmp_path: Path):
    loaded = load(tmp_path, rewards={"sandbox": "bubblewrap"})
    assert loaded.config.rewards.sandbox == "namespaces"
    assert "the same wall" in loaded.findings[0].message


def test_lora_restart_is_lora_only_as_often(tmp_path: Path):
    sections = {"engine": {"kind": "vllm"}, "adapter": {"kind": "lora"}}
    loaded = load(tmp_path, bridge={"kind": "lora_restart"}, **sections)
    assert (loaded.config.bridge.kind, getattr(loaded.config.bridge, "every_steps", None)) == ("lora_only", 3)
    assert "takes the adapter while it runs" in loaded.findings[0].message
    again = load(tmp_path, "bridge.kind=lora_restart", "bridge.every_steps=7", **sections)
    assert getattr(again.config.bridge, "every_steps", None) == 7
