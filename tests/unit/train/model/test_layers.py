"""Training some decoder layers only, with and without an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from lachesis.bridges.adapters import adapter_config
from lachesis.bridges.extract import full_weights, lora_pairs
from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.train.model.layers import lora_targets, train_only
from lachesis.train.model.loading import add_lora, load_model
from tests.tiny import tiny_model, tiny_tokenizer

ARCHITECTURES = ["qwen2", "llama"]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    def save(architecture: str) -> Path:
        tiny_model(architecture).save_pretrained(str(tmp_path))
        tiny_tokenizer().save_pretrained(str(tmp_path))
        return tmp_path

    return save


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rest_stays_as_it_is(saved: Callable[[str], Path], architecture: str):
    config = ModelConfig(path=str(saved(architecture)), device="cpu", train_layers=[1])
    model = load_model(config, NoAdapterConfig()).transformer
    before = {name: tensor.clone() for name, tensor in full_weights(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    ids = torch.arange(4, 12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moved = {name for name, tensor in full_weights(model) if not torch.equal(tensor, before[name])}
    assert moved
    assert all(name.startswith("model.layers.1.") for name in moved)
    assert {name for name in before if name.startswith("model.layers.1.")} == moved


def test_an_embedding_that_is_also_the_head_is_frozen_too():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    train_only(model, [0])
    assert not model.get_input_embeddings().weight.requires_grad
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_an_adapter_on_some_layers(architecture: str, targets: str | list[str]):
    model = add_lora(tiny_model(architecture), LoraAdapterConfig(r=2, targets=targets, layers=[1]))
    modules = [pair.module for pair in lora_pairs(model)]
    assert modules
    assert {module.split(".")[2] for module in modules} == {"1"}
    assert "lm_head" not in modules
    leaves = {module.rpartition(".")[2] for module in modules}
    assert leaves == set(targets) if isinstance(targets, list) else leaves >= {"q_proj", "o_proj", "down_proj"}
    assert all(".layers.1." in name for name, p in model.named_parameters() if p.requires_grad)


def test_the_adapter_loads_elsewhere_as_it_was_saved(tmp_path: Path):
    model = add_lora(tiny_model("qwen2"), LoraAdapterConfig(r=2, layers=[0]))
    for pair in lora_pairs(model):
        torch.nn.init.normal_(pair.b, std=0.1)
    model.save_pretrained(str(tmp_path))
    assert json.loads(adapter_config(model))["layers_to_transform"] == [0]
    again = PeftModel.from_pretrained(tiny_model("qwen2"), str(tmp_path))
    ids = torch.arange(4, 12)[None]
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("key", ["model.train_layers", "adapter.layers"])
def test_a_layer_that_is_not_there_is_named(key: str):
    model = tiny_model("qwen2")
    with pytest.raises(ModelError, match=f"{key} names layer 7, and Qwen2ForCausalLM has 2 decoder layers") as caught:
        if key == "adapter.layers":
            lora_targets(model, LoraAdapterConfig(layers=[0, 7]))
        else:
            train_only(model, [0, 7])
    assert caught.value.remedy == "choose from 0 to 1"
