"""A saved model is read back and compared, bit for bit, before it counts as saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from lachesis.common.errors import CheckpointError
from lachesis.train.checkpoint import save_model
from lachesis.train.model.saved_check import check_saved, contents_to_save
from tests.tiny import tiny_model

NAME = "model.norm.weight"


@pytest.mark.parametrize(
    "architecture",
    ["qwen2", "gemma2", "gpt2", "bloom", "mamba", "deepseek_v3", "gpt_oss", "llama4_text"],
)
def test_models_are_saved_as_they_are(architecture: str, tmp_path: Path):
    save_model(tiny_model(architecture), None, tmp_path / "final")
    targets = ["in_proj"] if architecture == "mamba" else "all-linear"  # peft refuses Mamba's out_proj
    adapted = get_peft_model(tiny_model(architecture), LoraConfig(r=2, target_modules=targets))
    save_model(adapted, None, tmp_path / "adapter")
    assert (tmp_path / "final" / "config.json").is_file()
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def changed(tensors: dict[str, Tensor]) -> None:
    tensors[NAME].view(torch.int32)[-1] += 1


def narrowed(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME].bfloat16()


def lost(tensors: dict[str, Tensor]) -> None:
    del tensors[NAME]


def added(tensors: dict[str, Tensor]) -> None:
    tensors["other.weight"] = torch.ones(2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed, "'model.norm.weight' has other values"),
        (narrowed, r"'model.norm.weight' is torch.bfloat16 .* should be torch.float32"),
        (lost, "'model.norm.weight' is missing"),
        (added, "'other.weight' should not be there"),
    ],
)
def test_a_difference_is_an_error_that_names_the_tensor(damage, message: str, tmp_path: Path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    expected = contents_to_save(model)
    assert expected is not None
    check_saved(tmp_path, expected)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        check_saved(tmp_path, expected)
