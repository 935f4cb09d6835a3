"""A tower for images is no part of what is trained, and is part of what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lachesis.config.schema import ModelConfig, NoAdapterConfig
from lachesis.train.checkpoint import save_model
from lachesis.train.model.loading import load_model
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=_TEXT, vision_config=_VISION))
    whole.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def test_what_is_saved_has_all_tensors_under_the_checkpoints_own_names(checkpoint: Path, tmp_path: Path, caplog):
    loaded = load_model(ModelConfig(path=str(checkpoint), device="cpu"), NoAdapterConfig())
    assert "are not trained and are kept" in caplog.text
    for parameter in loaded.transformer.parameters():
        parameter.add_(1)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "final", write=loaded.writer())

    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path / "final"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor if ".visual." in name else tensor + 1)
    again, info = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(again.config) is Qwen3_5Config
