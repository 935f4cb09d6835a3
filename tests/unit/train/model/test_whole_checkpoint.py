"""A tower for images is no part of what is trained, and is part of what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
)

from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.plugins.export.unwrap import unwrap
from lachesis.train.checkpoint import save_model
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.forward import plan_forward
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
    assert "are not trained and are saved" in caplog.text
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


def test_a_wrappers_words_around_it_are_named_with_the_command_that_removes_them(checkpoint: Path, tmp_path: Path):
    weights = load_file(checkpoint / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in weights.items()}, checkpoint / "model.safetensors")
    with pytest.raises(ModelError, match="28 of 28 tensors of Qwen3_5ForCausalLM are not in the files") as caught:
        load_model(ModelConfig(path=str(checkpoint), device="cpu"), NoAdapterConfig())
    assert "--unwrap" in caught.value.remedy
    unwrap(str(checkpoint), tmp_path / "copy")
    assert load_file(tmp_path / "copy" / "model.safetensors").keys() == weights.keys()
    load_model(ModelConfig(path=str(tmp_path / "copy"), device="cpu"), NoAdapterConfig())


_PLAIN = {key: value for key, value in _TEXT.items() if not key.startswith(("linear_", "layer_types"))}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_OF_IMAGES_AND_TEXT = {
    "mistral3": lambda: Mistral3Config(
        text_config=_PLAIN | {"model_type": "mistral"},
        vision_config=_TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 28},
        image_token_index=5,
    ),
    "gemma3": lambda: Gemma3Config(
        text_config=_PLAIN, vision_config=_TOWER | {"image_size": 28}, mm_tokens_per_image=1, image_token_index=5
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=_PLAIN
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        vision_config=_VISION | {"depth": 3, "deepstack_visual_indexes": [0]},
        image_token_id=5,
    ),
}


@pytest.fixture(params=_OF_IMAGES_AND_TEXT)
def of_images_and_text(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model that transformers has for images and text together alone, with a tower of more layers than the text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(_OF_IMAGES_AND_TEXT[request.param]()).save_pretrained(
            tmp_path / "model"
        )
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def test_the_tower_of_a_model_for_images_and_text_is_frozen_and_saved(of_images_and_text: Path, tmp_path: Path):
    loaded = load_model(ModelConfig(path=str(of_images_and_text), device="cpu"), NoAdapterConfig())
    assert len(decoder_layers(loaded.transformer)) == 2
    assert plan_forward(loaded.transformer, packing="auto").packed
    for parameter in loaded.transformer.parameters():
        parameter.add_(parameter.requires_grad)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "final", write=loaded.writer())

    before, after = (load_file(path / "model.safetensors") for path in (of_images_and_text, tmp_path / "final"))
    assert before.keys() == after.keys()
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    assert trained == {name for name in before if "language_model" in name or name == "lm_head.weight"}


def test_adapters_are_put_on_the_language_model_alone(of_images_and_text: Path):
    loaded = load_model(ModelConfig(path=str(of_images_and_text), device="cpu"), LoraAdapterConfig(r=2))
    trained = [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7
    assert all("language_model.layers." in name for name in trained)
