from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lachesis.bridges.sent_weights import (
    adapter_digests,
    as_saved,
    base_parameters,
    full_digests,
    full_weights,
    lora_pairs,
    lora_spec,
    lora_tensors,
    saved_shapes,
    tensor_list,
)
from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig
from lachesis.train.model.lora import add_lora
from lachesis.transport.float8 import by_rows
from tests.tiny import tiny_model
from tests.unit.transport.sharing import digest

Q = "model.layers.0.self_attn.q_proj"


def adapted(architecture: str = "qwen2", *, dtype: torch.dtype = torch.float32, **options):
    """A model with an adapter that does something: fresh ones have B = 0."""
    base = tiny_model(architecture).to(dtype)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(base, LoraConfig(**config), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


class TestFullWeights:
    @pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "gpt2"])
    def test_without_adapter_they_are_the_models_own(self, architecture):
        model = tiny_model(architecture)
        found = dict(full_weights(model))
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert found[name].data_ptr() == parameter.data_ptr() and not found[name].requires_grad

    def test_tied_weights_come_once(self):
        names = [name for name, _ in full_weights(tiny_model("qwen2", tie_word_embeddings=True))]
        assert names.count("model.embed_tokens.weight") == 1
        assert "lm_head.weight" not in names

    @pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2"])
    @pytest.mark.parametrize("rslora", [False, True])
    def test_an_adapter_is_merged_as_peft_merges_it(self, architecture, rslora):
        model = adapted(architecture, use_rslora=rslora)
        found = {name: tensor.clone() for name, tensor in full_weights(model)}
        merged = copy.deepcopy(model).merge_and_unload()
        expected = dict(merged.named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in expected.items():
            assert torch.allclose(found[name], parameter, atol=1e-6), name
        changed = [n for n, p in base_parameters(model).items() if not torch.equal(found[n], p)]
        assert len(changed) == len(lora_pairs(model)), "and nothing else"

    def test_merging_rounds_once(self):
        model = adapted(dtype=torch.bfloat16)
        pair = next(pair for pair in lora_pairs(model) if pair.module == Q)
        exact = base_parameters(model)[f"{Q}.weight"].double() + pair.scaling * pair.b.double() @ pair.a.double()
        found = dict(full_weights(model))[f"{Q}.weight"]
        assert found.dtype == torch.bfloat16
        nearest = exact.to(torch.bfloat16)
        assert (found == nearest).double().mean() > 0.99
        assert (found.double() - exact).abs().max() <= (nearest.double() - exact).abs().max() * 1.01

    def test_the_model_itself_is_left_alone(self):
        model = adapted()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert not any(tensor.requires_grad for _, tensor in full_weights(model))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    def test_an_adapter_on_a_tied_head_is_not_merged_into_the_embeddings(self):
        model = get_peft_model(
            tiny_model(tie_word_embeddings=True), LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
        )
        with pytest.raises(
            ModelError, match=r"lm_head\.weight, which shares its weight with the embeddings .*lora_only"
        ):
            [*full_weights(model)]


class TestAdapter:
    def test_names_are_those_of_a_saved_adapter(self, tmp_path):
        from safetensors.torch import load_file

        model = adapted()
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "adapter_model.safetensors")
        found = lora_tensors(model)
        assert {f"base_model.model.{name}" for name in found} == saved.keys()
        assert all(torch.equal(saved[f"base_model.model.{name}"], tensor) for name, tensor in found.items())
        assert list(found) == sorted(found)

    def test_tensors_are_live_and_without_gradients(self):
        model = adapted()
        found = lora_tensors(model)
        with torch.no_grad():
            lora_pairs(model)[0].a.fill_(3.0)
        assert not any(t.requires_grad for t in found.values())
        assert (found[f"{Q}.lora_A.weight"] == 3.0).all()

    def test_the_spec_says_rank_alpha_and_targets(self):
        model = add_lora(tiny_model(), LoraAdapterConfig(r=4, alpha=6, targets=["q_proj", "down_proj"]))
        spec = lora_spec(model)
        assert (spec.r, spec.alpha, spec.rslora, spec.name) == (4, 6.0, False, "policy")
        assert spec.target_modules == ("down_proj", "q_proj")
        assert spec.scaling == lora_pairs(model)[0].scaling == 1.5
        assert lora_spec(adapted(use_rslora=True)).scaling == 4.0

    @pytest.mark.parametrize("pattern", [{"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}}], ids=str)
    def test_layers_with_ranks_of_their_own_are_refused(self, pattern):
        with pytest.raises(ModelError, match=r"q_proj has rank \d and scaling"):
            lora_spec(adapted(**pattern))

    def test_the_list_for_the_receiver(self):
        tensors = lora_tensors(adapted(dtype=torch.bfloat16))
        listed = tensor_list(tensors)
        assert [entry.name for entry in listed] == list(tensors)
        assert (listed[0].shape, listed[0].dtype) == (tuple(next(iter(tensors.values())).shape), "bfloat16")

    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({"use_dora": True}, "DoRA"),
            ({"lora_bias": True, "target_modules": ["q_proj"]}, "with a bias"),
            ({"target_modules": ["embed_tokens"]}, "of an embedding"),
        ],
        ids=["dora", "bias", "embedding"],
    )
    def test_what_engines_cannot_take_is_refused(self, options, kind):
        model = adapted(**options)
        for extract in (lora_tensors, lambda m: dict(full_weights(m))):
            with pytest.raises(ModelError, match=f"is .*{kind}.*cannot take") as caught:
                extract(model)
            assert caught.value.remedy

    def test_without_an_adapter_there_is_none(self):
        for extract in (lora_tensors, lora_spec, lora_pairs):
            with pytest.raises(ModelError, match="has no adapter"):
                extract(tiny_model())


class TestDigests:
    def test_the_adapters_are_of_what_an_engine_holds(self):
        model = adapted()
        found = adapter_digests(model, dtype=torch.bfloat16)
        tensors = lora_tensors(model)
        assert found.keys() == tensors.keys()
        a, b = (tensors[f"{Q}.lora_{x}.weight"].to(torch.bfloat16) for x in "AB")
        assert found[f"{Q}.lora_A.weight"] == digest(a)
        assert found[f"{Q}.lora_B.weight"] == digest(b * 2.0) != digest(b)

    def test_a_single_element_changes_one_digest(self):
        model = adapted()
        before = adapter_digests(model, dtype=torch.float32)
        with torch.no_grad():
            lora_pairs(model)[0].b[0, 0] += 1e-3
        after = adapter_digests(model, dtype=torch.float32)
        assert [name for name in before if before[name] != after[name]] == [f"{Q}.lora_B.weight"]

    def test_full_digests_are_those_of_full_weights(self):
        for model in (adapted(), tiny_model()):
            assert full_digests(model) == {name: digest(tensor) for name, tensor in full_weights(model)}

    def test_of_tensors_that_an_engine_rounds_they_are_those_of_bytes_and_scales(self):
        model = adapted().bfloat16()
        plain, rounded = full_digests(model), full_digests(model, quantized=[f"{Q}.weight"])
        merged = dict(full_weights(model))[f"{Q}.weight"]
        held, scales = by_rows(merged)
        expected = {f"{Q}.weight": digest(held), f"{Q}.weight_scale": digest(scales)}
        assert rounded == plain | expected and rounded[f"{Q}.weight"] != plain[f"{Q}.weight"]


class TestMixtures:
    """Transformers stacks the experts of a layer in one parameter; files and vLLM have each by itself."""

    EXPERTS = "model.layers.1.mlp.experts"

    def test_each_expert_is_saved_by_itself_as_transformers_saves_it(self):
        model = tiny_model("qwen3_moe")
        found = dict(as_saved(model, full_weights(model)))
        stacked, down = (model.get_parameter(f"{self.EXPERTS}.{name}_proj") for name in ("gate_up", "down"))
        assert torch.equal(found[f"{self.EXPERTS}.3.gate_proj.weight"], stacked[3, :16])
        assert torch.equal(found[f"{self.EXPERTS}.3.up_proj.weight"], stacked[3, 16:])
        assert torch.equal(found[f"{self.EXPERTS}.2.down_proj.weight"], down[2])
        assert f"{self.EXPERTS}.down_proj" not in found
        assert sum(t.numel() for t in found.values()) == sum(p.numel() for p in model.parameters())

    def test_shapes_are_known_without_bytes_and_in_the_same_order(self):
        model = adapted("qwen3_moe", target_modules=["q_proj"])
        found, shapes = dict(as_saved(model, full_weights(model))), saved_shapes(model)
        assert [(n, t.shape) for n, t in found.items()] == [(n, t.shape) for n, t in shapes.items()]
        assert {tensor.device.type for tensor in shapes.values()} == {"meta"}

    def test_other_models_are_saved_as_they_are(self):
        model = tiny_model("qwen2")
        pairs = zip(as_saved(model, full_weights(model)), full_weights(model), strict=True)
        assert all(a[0] == b[0] and a[1].data_ptr() == b[1].data_ptr() for a, b in pairs)

    @pytest.mark.parametrize("targets", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["gate", "down_proj"]])
    @pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
    def test_adapters_of_experts_and_routers_are_merged(self, targets):
        model, tokens = adapted("qwen3_moe", target_modules=targets), torch.arange(3, 23)[None]
        expected = model(input_ids=tokens).logits
        merged = tiny_model("qwen3_moe")
        merged.load_state_dict(dict(full_weights(model)))
        assert not torch.allclose(tiny_model("qwen3_moe")(input_ids=tokens).logits, expected, atol=0.1)
        torch.testing.assert_close(merged(input_ids=tokens).logits, expected, atol=1e-4, rtol=0)

    def test_engines_take_none_of_experts(self):
        model = adapted("qwen3_moe", target_modules=["q_proj", "down_proj"])
        with pytest.raises(ModelError, match=r"2 parameters that are not linear layers.*experts.down_proj") as caught:
            lora_tensors(model)
        assert "broadcast" in caught.value.remedy

    def test_all_linear_layers_are_those_that_engines_take(self):
        model = add_lora(tiny_model("qwen3_moe"), LoraAdapterConfig(r=4))
        assert lora_spec(model).target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")
