"""Base weights in 8 and 4 bits on a CPU: how far they are off, and that all else holds as with whole ones."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from lachesis.bridges.sent_weights import adapter_digests, lora_spec, lora_tensors
from lachesis.common.errors import DependencyError, ModelError
from lachesis.config.schema import LachesisConfig, LoraAdapterConfig, ModelConfig, OptimizerConfig
from lachesis.plan.memory import held_weights_bytes
from lachesis.plan.shapes import read_shape
from lachesis.train.batch import Batch, pack
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.distributed.strategy import SingleDevice
from lachesis.train.model.forward import target_logprobs
from lachesis.train.model.loading import LoadedModel, load_model
from lachesis.train.model.quantization import held_bytes, quantized_layers, settle
from lachesis.train.optim.optimizer import build_optimizer
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups

bnb = pytest.importorskip("bitsandbytes")

KINDS = ("int8", "nf4")
# Root mean square of a weight's error, in standard deviations of the weights. int8: steps of absmax / 127 of a row of
# 64, which is 2.6 deviations, over √12. NF4: 4 bits over blocks of 64, the design's own figure.
WEIGHT_ERROR = {"int8": 0.006, "nf4": 0.09}
LAYERS = 14


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, initializer_range=0.08)
    model.bfloat16().float().save_pretrained(directory)  # the same weights in both dtypes
    tiny_tokenizer().save_pretrained(directory)
    return directory


def load(path: Path, kind: str, *, dropout: float = 0.0, **options) -> LoadedModel:
    config = ModelConfig.model_validate({"path": str(path), "device": "cpu", "quantization": kind, **options})
    torch.manual_seed(0)
    loaded = load_model(config, LoraAdapterConfig(r=4, dropout=dropout))
    torch.manual_seed(1)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:  # at zero an adapter would not show
            torch.nn.init.normal_(parameter, std=0.02)
    return loaded


def make_policy(loaded: LoadedModel, *, packing: str = "auto", learning_rate: float = 1e-2, **options) -> Policy:
    return Policy(
        loaded,
        strategy=SingleDevice(),
        optimizer_builder=partial(
            build_optimizer, config=OptimizerConfig.model_validate(options), learning_rate=learning_rate, total_steps=50
        ),
        options=loss_options(),
        packing=packing,
    )


def batch_for(policy: Policy, *, advantage: float | None = None) -> Batch:
    groups = random_groups(groups=3, samples=4, longest=9)
    if advantage is not None:
        groups = [replace(g, samples=tuple(replace(s, advantage=advantage) for s in g.samples)) for g in groups]
    return pack(groups, max_tokens=60, share_prefixes=policy.plan.packed)


def logprobs(policy: Policy) -> torch.Tensor:
    parts = [target_logprobs(policy.transformer, m, plan=policy.plan).logprobs for m in batch_for(policy).micro_batches]
    return torch.cat(parts).detach().float()


def gradients(policy: Policy) -> torch.Tensor:
    policy.accumulate(batch_for(policy))
    return torch.cat([p.grad.flatten().float() for p in policy.model.parameters() if p.grad is not None])


def dequantized(loaded: LoadedModel) -> list[torch.Tensor]:
    layers = quantized_layers(loaded.model)
    if hasattr(layers[0].weight, "quant_state"):
        return [bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state) for layer in layers]
    scales = [layer.weight.SCB if layer.state.SCB is None else layer.state.SCB for layer in layers]
    return [layer.weight.data.float() * scale[:, None] / 127 for layer, scale in zip(layers, scales, strict=True)]


def whole_layers(loaded: LoadedModel) -> list[torch.nn.Linear]:
    """The layers of a model in float32 that are quantized in the others, in the same order."""
    return [m for n, m in loaded.transformer.named_modules() if n.endswith("base_layer")]


def unquantized_twin(path: Path, loaded: LoadedModel) -> LoadedModel:
    """A float32 model with exactly the weights that the quantized one stands for."""
    twin = load(path, "none")
    layers = whole_layers(twin)
    assert len(layers) == LAYERS
    with torch.no_grad():
        for layer, weight in zip(layers, dequantized(loaded), strict=True):
            layer.weight.copy_(weight)
    return twin


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_off_by_what_their_bits_allow(saved, kind):
    whole, loaded = whole_layers(load(saved, "none")), load(saved, kind)
    assert len(quantized_layers(loaded.model)) == LAYERS
    for layer, weight in zip(whole, dequantized(loaded), strict=True):
        error = (weight - layer.weight).pow(2).mean().sqrt() / layer.weight.std()
        assert 0.8 * WEIGHT_ERROR[kind] < error < 1.2 * WEIGHT_ERROR[kind]


def test_logprobs_are_off_in_proportion(saved):
    """Half a percent and eight percent of weights: mean logprobs here move by 0.01 and 0.1 nats."""
    exact = logprobs(make_policy(load(saved, "none")))
    errors = {kind: float((logprobs(make_policy(load(saved, kind))) - exact).abs().mean()) for kind in KINDS}
    assert 0 < errors["int8"] < 0.02
    assert errors["nf4"] < 0.3
    expected = WEIGHT_ERROR["nf4"] / WEIGHT_ERROR["int8"]
    assert expected / 2 < errors["nf4"] / errors["int8"] < expected * 2


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_gradients_are_those_of_the_weights_that_are_held(saved, kind):
    """Also after passes in evaluation, where bitsandbytes' CPU kernels would round more, or lose the gradient."""
    policy = make_policy(load(saved, kind))
    twin = make_policy(unquantized_twin(saved, policy.loaded))
    expected, expected_gradients = logprobs(twin), gradients(twin)
    for _ in range(2):
        torch.testing.assert_close(logprobs(policy), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients(policy), expected_gradients, rtol=1e-3, atol=1e-6)
        policy.optimizer.zero_grad()
    policy.model.train()
    torch.testing.assert_close(logprobs(policy), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_and_padded_rows_have_the_same_gradient(saved, kind):
    packed, padded = (gradients(make_policy(load(saved, kind), packing=p)) for p in ("packed", "padded"))
    torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(saved, kind):
    plain = gradients(make_policy(load(saved, kind)))
    policy = make_policy(load(saved, kind, gradient_checkpointing=True))
    assert policy.transformer.is_gradient_checkpointing
    torch.testing.assert_close(gradients(policy), plain, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_learns_what_is_rewarded_and_the_base_stays(saved, kind):
    policy = make_policy(load(saved, kind))
    base = [weight.clone() for weight in dequantized(policy.loaded)]
    batch = batch_for(policy, advantage=1.0)
    before = logprobs(policy).mean()
    for _ in range(5):
        policy.accumulate(batch)
        policy.step()
    assert logprobs(policy).mean() > before + 0.5
    assert all(torch.equal(a, b) for a, b in zip(base, dequantized(policy.loaded), strict=True))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_with_16_bit_weights_adapters_have_16_bits_and_float32_masters(saved, kind):
    policy = make_policy(load(saved, kind, dtype="bfloat16"))
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.bfloat16}
    assert len(policy.optimizer.state_dict()["parts"][0]["update"]["masters"]) == len(trained)
    exact = logprobs(make_policy(load(saved, kind)))
    assert float((logprobs(policy) - exact).abs().mean()) < 0.03, "rounding alone, the weights being the same"


@pytest.mark.parametrize(("kind", "dtype"), [("int8", "float32"), ("nf4", "float32"), ("nf4", "bfloat16")])
def test_the_plan_counts_the_bytes_that_are_held(saved, kind, dtype):
    shape = read_shape(str(saved))
    assert shape is not None
    config = LachesisConfig.model_validate(
        {"run": {"steps": 1}, "data": {"path": "a"}, "rewards": {"functions": ["a.b"]}, "adapter": {"kind": "lora"}}
        | {"model": {"path": str(saved), "dtype": dtype, "quantization": kind}}
    )
    width = 4 if dtype == "float32" else 2
    model = load(saved, kind, dtype=dtype).model
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert held_bytes(model) - trained == held_weights_bytes(config, shape, width=width)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_what_is_trained_and_a_new_start_goes_on_from_it(saved, kind, tmp_path):
    policy = make_policy(load(saved, kind, dtype="bfloat16"))
    checkpoints = CheckpointManager(tmp_path / "checkpoints", keep_last=1)
    policy.accumulate(batch_for(policy))
    policy.step()
    held = policy.weights()
    assert held and all("lora_" in name for name in held)
    state = {"optimizer": policy.optimizer.state_dict()}
    checkpoints.save(1, tensors=held, state=state, meta={})
    policy.accumulate(batch_for(policy))
    policy.step()

    resumed = make_policy(load(saved, kind, dtype="bfloat16"))
    found = checkpoints.load()
    with torch.no_grad():
        for name, parameter in resumed.weights().items():
            parameter.copy_(found.tensors[name])
    resumed.optimizer.load_state_dict(found.state["optimizer"])
    resumed.accumulate(batch_for(resumed))
    resumed.step()
    expected = policy.weights()
    for name, tensor in resumed.weights().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gets_the_adapter_as_from_whole_weights(saved, kind, tmp_path):
    whole, quantized = load(saved, "none").model, load(saved, kind).model
    assert lora_spec(quantized) == lora_spec(whole)
    assert lora_tensors(quantized).keys() == lora_tensors(whole).keys()
    assert adapter_digests(quantized, dtype=torch.bfloat16) == adapter_digests(whole, dtype=torch.bfloat16)
    quantized.save_pretrained(str(tmp_path))
    served = PeftModel.from_pretrained(tiny_model("llama", hidden_size=64, intermediate_size=128), str(tmp_path))
    assert lora_tensors(served).keys() == lora_tensors(quantized).keys()


def test_without_bitsandbytes_the_error_says_what_to_install(saved, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else real(name))
    with pytest.raises(DependencyError, match=r"model\.quantization nf4 needs bitsandbytes") as caught:
        load(saved, "nf4")
    assert "pip install bitsandbytes" in caught.value.remedy
    assert quantized_layers(tiny_model()) == []


def test_a_model_in_whole_weights_is_left_alone():
    model = tiny_model()
    settle(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_int8_in_float32_on_a_gpu_is_refused():
    class OnGpu(torch.nn.Sequential):
        device, dtype = torch.device("cuda"), torch.float32

    of_eight, of_four = bnb.nn.Linear8bitLt(4, 4, has_fp16_weights=False), bnb.nn.Linear4bit(4, 4)
    of_eight.weight.SCB, of_four.weight.quant_state = torch.ones(4), bnb.functional.QuantState(torch.ones(1))
    with pytest.raises(ModelError, match=r"int8 .* on a GPU") as caught:
        settle(OnGpu(of_eight))  # type: ignore[arg-type]
    assert "model.dtype: bfloat16" in caught.value.remedy
    settle(OnGpu(of_four))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="hold no scales"):
        settle(OnGpu(bnb.nn.Linear4bit(4, 4)))  # type: ignore[arg-type]
