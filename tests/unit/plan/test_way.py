"""What is expected of a model's packing before it is loaded."""

from __future__ import annotations

import pytest

from lachesis.config.schema import ModelConfig
from lachesis.plan.way import way_line


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear", "deepseek_v3"])
def test_models_whose_layers_can_be_replaced_are_expected_to_train_packed(kind: str):
    assert f"{kind} is expected to train packed" in str(way_line(ModelConfig(path="m"), kind=kind))


@pytest.mark.parametrize("kind", ["mamba", "jamba", "bloom", "falcon", "recurrent_gemma", "rwkv"])
def test_others_are_expected_to_train_padded(kind: str):
    assert f"{kind} is expected to train on padded rows" in str(way_line(ModelConfig(path="m"), kind=kind))


def test_padded_rows_can_be_asked_for():
    assert "padded rows" in str(way_line(ModelConfig(path="m", packing="padded"), kind="qwen3"))


def test_nothing_is_said_of_models_that_transformers_lacks():
    assert way_line(ModelConfig(path="m"), kind="of_their_own_code") is None
