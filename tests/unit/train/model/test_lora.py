"""Adapters: new and continued ones, on the layers that can have one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from lachesis.bridges.model_files import adapter_config
from lachesis.bridges.sent_weights import lora_pairs
from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.train.model.forward import plan_forward
from lachesis.train.model.loading import load_model, train_only
from lachesis.train.model.lora import add_lora, lora_targets
from tests.tiny import tiny_model

SaveModel = Callable[..., Path]


def config(path: Path, **options) -> ModelConfig:
    return ModelConfig(path=str(path), device="cpu", **options)


class TestAdapter:
    def test_only_the_adapter_is_trained(self, save: SaveModel):
        loaded = load_model(config(save()), LoraAdapterConfig(r=2))
        assert isinstance(loaded.model, PeftModel)
        trained = [name for name, p in loaded.model.named_parameters() if p.requires_grad]
        assert trained
        assert all("lora_" in name for name in trained)
        assert not any("lm_head" in name for name in trained)

    def test_targets_that_match_nothing_name_the_layers_that_there_are(self):
        with pytest.raises(ModelError, match=r"adapter.targets \['query_key_value'\] match nothing in Qwen2") as caught:
            add_lora(tiny_model(), LoraAdapterConfig(targets=["query_key_value"]))
        assert "q_proj" in caught.value.remedy
        assert "all-linear" in caught.value.remedy

    def test_all_linear_leaves_out_what_fused_kernels_read_without_the_adapter(self, caplog):
        model = add_lora(tiny_model("nemotron_h"), LoraAdapterConfig(r=2))
        adapted = {
            name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name
        }
        assert {"in_proj", "q_proj"} <= adapted
        assert "out_proj" not in adapted
        assert "skips out_proj" in caplog.text

    def test_all_linear_leaves_out_what_is_read_directly_in_training_mode(self):
        model = add_lora(tiny_model("gemma3n_text"), LoraAdapterConfig(r=2))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        assert plan_forward(model.get_base_model(), packing="auto").packed, "it trains what it computes elsewhere"
        assert not any("correction_coefs" in name for name, _ in model.named_parameters() if "lora_" in name)

    @pytest.mark.parametrize("architecture", ["llama4_text", "phimoe"])
    def test_all_linear_leaves_out_routers(self, architecture: str):
        model = add_lora(tiny_model(architecture), LoraAdapterConfig(r=2))
        assert not any("router" in name for name, _ in model.named_parameters() if "lora_" in name)
        model(input_ids=torch.tensor([[5, 9, 13]]))

    @pytest.mark.parametrize("targets", [["embed_tokens", "q_proj"], r".*\.embed_tokens"])
    def test_embeddings_that_are_the_head_too_are_refused(self, targets: list[str] | str):
        with pytest.raises(ModelError, match=r"model\.embed_tokens, which shares its weight with the head"):
            add_lora(tiny_model("qwen2", tie_word_embeddings=True), LoraAdapterConfig(r=2, targets=targets))
        add_lora(tiny_model("qwen2", tie_word_embeddings=False), LoraAdapterConfig(r=2, targets=targets))

    def test_gradients_reach_the_adapter_through_checkpointed_layers(self, save: SaveModel):
        loaded = load_model(config(save(), gradient_checkpointing=True), LoraAdapterConfig(r=2))
        loaded.model.train()
        loaded.model(torch.tensor([[5, 9, 13]])).logits.sum().backward()
        gradients = [p.grad for name, p in loaded.model.named_parameters() if "lora_B" in name]
        assert gradients
        assert all(grad is not None and grad.abs().sum() > 0 for grad in gradients)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
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


class TestAnAdapterToStartFrom:
    """An adapter that an SFT run has saved, and what differs from it in the configuration."""

    @pytest.fixture
    def saved(self, save: SaveModel, tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
        base = save()
        loaded = load_model(config(base), LoraAdapterConfig(r=4, alpha=8, targets=["q_proj", "v_proj"]))
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(0))
            logits = loaded.transformer(torch.tensor([[5, 6, 7]])).logits
        loaded.model.save_pretrained(tmp_path / "adapter")
        return base, tmp_path / "adapter", logits

    def test_training_starts_from_it(self, saved: tuple[Path, Path, torch.Tensor]):
        base, adapter, logits = saved
        start = LoraAdapterConfig(path=str(adapter), r=4, alpha=8, targets=["q_proj", "v_proj"])
        loaded = load_model(config(base), start)
        torch.testing.assert_close(loaded.transformer(torch.tensor([[5, 6, 7]])).logits, logits)
        assert loaded.continued and all(p.requires_grad for n, p in loaded.model.named_parameters() if "lora_" in n)

    @pytest.mark.parametrize(
        "other", [{"r": 8}, {"alpha": 16}, {"targets": ["q_proj"]}, {"targets": ["q_proj", "k_proj"]}, {"layers": [0]}]
    )
    def test_settings_that_are_not_its_own_are_named(self, saved: tuple[Path, Path, torch.Tensor], other: dict):
        base, adapter, _ = saved
        given = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]} | other
        words = r"rank 4, alpha 8 .*set adapter\.r: 4, adapter\.alpha: 8 and adapter\.targets: \['q_proj', 'v_proj'\]"
        with pytest.raises(ModelError, match=words):
            load_model(config(base), LoraAdapterConfig(path=str(adapter), **given))

    def test_more_than_plain_lora_is_refused(self, saved: tuple[Path, Path, torch.Tensor]):
        base, adapter, _ = saved
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
        with pytest.raises(ModelError, match=r"more than plain LoRA \(use_rslora\).*merge it"):
            load_model(config(base), LoraAdapterConfig(path=str(adapter), r=4, alpha=8, targets=["q_proj", "v_proj"]))

    def test_an_adapter_as_the_model_is_told_where_it_goes(self, saved: tuple[Path, Path, torch.Tensor]):
        _, adapter, _ = saved
        with pytest.raises(
            ModelError, match=r"is an adapter, not a model.*set model\.path: .*qwen2, .*adapter\.path: "
        ):
            load_model(config(adapter), NoAdapterConfig())


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
    with pytest.raises(ModelError, match=f"{key} names layer 7, but Qwen2ForCausalLM has 2 decoder layers") as caught:
        if key == "adapter.layers":
            lora_targets(model, LoraAdapterConfig(layers=[0, 7]))
        else:
            train_only(model, [0, 7])
    assert caught.value.remedy == "choose from 0 to 1"
