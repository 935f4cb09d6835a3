"""The residual stream in float32 under bf16 weights, against float32 passes over the same weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.train.batch import MicroBatch, pack
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.forward import plan_forward, target_logprobs
from lachesis.train.model.loading import load_model
from lachesis.train.model.residual import keep_residual_in_float32
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups

RMS_NORM = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]
DEEP = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "initializer_range": 0.02}
IDS = torch.arange(3, 15)[None]


def bf16_model(architecture: str = "llama", **overrides) -> PreTrainedModel:
    """Parameters in bf16; buffers, such as rotary frequencies, in float32, as in a model that is loaded."""
    model = tiny_model(architecture, **overrides)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def widened(model: PreTrainedModel) -> PreTrainedModel:
    wide = copy.deepcopy(model)
    keep_residual_in_float32(wide)
    return wide


def micro_batch(model: PreTrainedModel, *, longest: int = 20) -> MicroBatch:
    groups = random_groups(groups=2, samples=4, longest=longest)
    return pack(groups, max_tokens=1 << 20, share_prefixes=True).micro_batches[0]


def logprobs_and_gradients(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Of one packed micro-batch: [M], and all gradients in one."""
    plan = plan_forward(model, packing="packed")
    found = target_logprobs(model, micro_batch(model), plan=plan).logprobs
    found.float().mean().backward()
    return found.detach().float(), torch.cat([p.grad.flatten().float() for p in model.parameters()])


@pytest.mark.parametrize(
    ("stream", "factor", "gradient_factor"), [(1.0, 1.25, 1.0), (10.0, 1.7, 1.3)], ids=["fresh", "trained"]
)
def test_logprobs_and_gradients_come_nearer_to_exact_ones(stream: float, factor: float, gradient_factor: float):
    """16 layers. Over seeds errors of logprobs fall by 1.4 to 2.4 in a fresh model, and by 2.1 to 3.4 in one whose
    stream is far larger than what a layer adds to it, as in those that are trained; errors of gradients by 1.0 to 1.4
    and 1.6 to 1.8."""
    model = bf16_model(seed=1, **DEEP)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(stream)
        model.get_output_embeddings().weight.mul_(4.0)
    exact, exact_gradients = logprobs_and_gradients(copy.deepcopy(model).float())
    wide, wide_gradients = logprobs_and_gradients(widened(model))
    usual, usual_gradients = logprobs_and_gradients(model)
    error, usual_error = (wide - exact).abs().mean(), (usual - exact).abs().mean()
    assert error < usual_error / factor, (error, usual_error)
    error, usual_error = (wide_gradients - exact_gradients).norm(), (usual_gradients - exact_gradients).norm()
    assert error < usual_error / gradient_factor, (error, usual_error)


@torch.no_grad()
@pytest.mark.parametrize("architecture", RMS_NORM)
def test_layers_add_up_in_float32_and_all_products_stay_in_bf16(architecture: str):
    model = bf16_model(architecture)
    exact = copy.deepcopy(model).float()(input_ids=IDS).logits
    keep_residual_in_float32(model)
    sums, products = [], []
    for layer in decoder_layers(model):
        layer.register_forward_hook(lambda _m, _i, output: sums.append(output.dtype))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _m, inputs, output: products.append((inputs[0].dtype, output.dtype)))
    found = model(input_ids=IDS).logits
    assert set(sums) == {torch.float32} and len(sums) == 2
    assert set(products) == {(torch.bfloat16, torch.bfloat16)}
    assert (found.float() - exact).abs().mean() < 0.1 * exact.std()
    packed = target_logprobs(model, micro_batch(model), plan=plan_forward(model, packing="packed"))
    assert packed.logprobs.isfinite().all()


def test_generation_with_a_cache_is_the_same_network():
    model = widened(bf16_model("qwen3", initializer_range=0.05))
    made = model.generate(IDS, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    again = model(input_ids=made.sequences).logits[0, IDS.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(made.logits), again.float(), rtol=0.02, atol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_a_model_that_cannot_says_so_and_stays_as_it_was(architecture: str):
    model = bf16_model(architecture)
    before = model(input_ids=IDS).logits
    with pytest.raises(ModelError, match="cannot be kept in float32") as caught:
        keep_residual_in_float32(model)
    assert "model.residual_dtype: auto" in caught.value.remedy
    assert torch.equal(model(input_ids=IDS).logits, before)


@torch.no_grad()
def test_layers_that_add_up_inside_of_their_parts_are_found_out():
    model = bf16_model("llama")
    for layer in decoder_layers(model):
        layer.self_attn = AddsItsInput(layer.self_attn)
        layer.mlp = AddsItsInput(layer.mlp)
        layer.forward = lambda x, layer=layer, **kwargs: layer.mlp(layer.self_attn(x, **kwargs))
    with pytest.raises(ModelError, match="inside of them"):
        keep_residual_in_float32(model)


class AddsItsInput(torch.nn.Module):
    """A part of a layer that has the residual connection in it."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        found = self.part(hidden_states, **kwargs)
        return hidden_states + (found[0] if isinstance(found, tuple) else found)


def test_a_model_in_float32_has_it_already():
    model = tiny_model()
    keep_residual_in_float32(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_copy_for_the_kl_reference_has_the_same_stream():
    wide = widened(bf16_model())
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(wide)(input_ids=IDS).logits, wide(input_ids=IDS).logits)
        assert not torch.equal(wide(input_ids=IDS).logits, bf16_model()(input_ids=IDS).logits)


class TestLoaded:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        bf16_model("llama").save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        return tmp_path

    def config(self, path: Path, **options) -> ModelConfig:
        fields = {"path": str(path), "device": "cpu", "dtype": "bfloat16", "residual_dtype": "float32"}
        return ModelConfig.model_validate(fields | options)

    def gradients(self, path: Path, **options) -> list[Tensor]:
        torch.manual_seed(0)
        loaded = load_model(self.config(path, **options), LoraAdapterConfig(r=4))
        plan = plan_forward(loaded.transformer, packing="packed")
        loaded.model.train()
        found = target_logprobs(loaded.transformer, micro_batch(loaded.transformer), plan=plan).logprobs
        found.float().mean().backward()
        return [p.grad for p in loaded.model.parameters() if p.requires_grad]

    def test_adapters_train_on_it_and_gradient_checkpointing_changes_nothing(self, path: Path):
        plain, recomputed = self.gradients(path), self.gradients(path, gradient_checkpointing=True)
        assert len(plain) == 28 and all(gradient.dtype == torch.bfloat16 for gradient in plain)
        for a, b in zip(plain, recomputed, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=1e-4)

    def test_parameters_that_belong_to_an_engine_are_left_where_they_are(self, path: Path):
        engine = bf16_model("llama", seed=3)
        loaded = load_model(self.config(path, dtype="auto"), NoAdapterConfig(), weights=Lent(engine))
        theirs = dict(engine.named_parameters())
        for name, parameter in loaded.transformer.named_parameters():
            assert parameter.data_ptr() == theirs[name].data_ptr()
        with torch.no_grad():
            found = loaded.transformer(input_ids=IDS).logits
            assert torch.equal(found, widened(engine)(input_ids=IDS).logits)
            assert not torch.equal(found, engine(input_ids=IDS).logits)


class Lent:
    """The weights of a model, as an engine would lend them."""

    dtype = torch.bfloat16

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = dict(model.named_parameters())

    def attach(self, model: PreTrainedModel) -> int:
        for name, _ in list(model.named_parameters()):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, self._tensors[name])
        return len(self._tensors)
