"""Float8 products on a CPU, where they are emulated: what they round, when, and that all else is as without."""

from __future__ import annotations

import copy
import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from lachesis.bridges.proof import TOLERANCE
from lachesis.common.errors import DependencyError, ModelError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig, OptimizerConfig
from lachesis.train.batch import Batch, idle_micro_batch
from lachesis.train.distributed.strategy import SingleDevice, decoder_layers
from lachesis.train.model import float8
from lachesis.train.model.float8 import Float8Scaling, Float8Switch, compute_in_float8
from lachesis.train.model.forward import target_logprobs
from lachesis.train.model.loading import LoadedModel, load_model
from lachesis.train.optim.optimizer import build_optimizer
from lachesis.train.policy import Policy
from tests.contracts.formats.test_quantized import batch_for
from tests.losses import loss_options
from tests.tiny import PAD_ID, tiny_model, tiny_tokenizer

pytest.importorskip("torchao")

SCALINGS = get_args(Float8Scaling)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.08}
CANARY = tuple(range(3, 14))
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(directory: Path) -> Path:
    tiny_model("llama", **SIZES).bfloat16().float().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def load(path: Path, scaling: str, *, adapter: LoraAdapterConfig | None = None, **options) -> LoadedModel:
    config = ModelConfig.model_validate({"path": str(path), "device": "cpu", "matmul_dtype": scaling, **options})
    torch.manual_seed(0)
    loaded = load_model(config, adapter or NoAdapterConfig())
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:  # at zero an adapter would not show
            nn.init.normal_(parameter, std=0.02)
    return loaded


def make_policy(loaded: LoadedModel, *, packing: str = "auto", beta: float = 0.0) -> Policy:
    def optimizer(parameters):
        return build_optimizer(parameters, config=OptimizerConfig(), learning_rate=1e-2, total_steps=50)

    options = loss_options(beta=beta)
    return Policy(loaded, strategy=SingleDevice(), optimizer_builder=optimizer, options=options, packing=packing)


def logprobs(policy: Policy, *, active: bool = True) -> Tensor:
    """Of the loss's passes, or of all others."""
    switch = policy.loaded.float8 if active else Float8Switch()
    with switch.on(), torch.no_grad():
        micros = batch_for(policy).micro_batches
        return torch.cat([target_logprobs(policy.transformer, m, plan=policy.plan).logprobs for m in micros]).float()


def gradients(policy: Policy, batch: Batch | None = None) -> Tensor:
    policy.accumulate(batch or batch_for(policy))
    return torch.cat([p.grad.flatten().float() for p in policy.model.parameters() if p.grad is not None])


def rounded(x: Tensor, *, dtype: torch.dtype, dim: int | None) -> Tensor:
    """``x`` in float8 and back, with one scale (``dim`` None) or scales along ``dim``, which are powers of 2."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = LARGEST[dtype] / largest
    scale = scale if dim is None else scale.log2().floor().exp2()
    return (x * scale).to(dtype).float() / scale


class Given:
    """Weights that come from elsewhere."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def attach(self, model) -> int:
        held = {name: nn.Parameter(torch.randn(p.shape) * 0.1) for name, p in model.named_parameters()}
        for name, parameter in held.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)
        self.places = {name: parameter.data_ptr() for name, parameter in held.items()}
        return len(held)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_multiplies_rounded_factors_forward_and_backward(scaling: Float8Scaling):
    model = tiny_model("llama", **SIZES)
    switch = compute_in_float8(model, scaling)
    layer = decoder_layers(model)[0].mlp.up_proj
    torch.manual_seed(0)
    x, given = torch.randn(2, 9, 64, requires_grad=True), torch.randn(2, 9, 128)
    with switch.on():
        found = layer(x)
        found.backward(given)
    e4m3, by_row = torch.float8_e4m3fn, scaling == "float8_rowwise"
    e5m2 = e4m3 if by_row else torch.float8_e5m2
    along = lambda dim: dim if by_row else None  # noqa: E731
    rows, weight, incoming = x.detach().flatten(0, 1), layer.weight.detach(), given.flatten(0, 1)
    expected = rounded(rows, dtype=e4m3, dim=along(1)) @ rounded(weight, dtype=e4m3, dim=along(1)).T
    torch.testing.assert_close(found.detach().flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
    expected = rounded(incoming, dtype=e5m2, dim=along(1)) @ rounded(weight, dtype=e4m3, dim=along(0))
    torch.testing.assert_close(x.grad.flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
    expected = rounded(incoming, dtype=e5m2, dim=along(0)).T @ rounded(rows, dtype=e4m3, dim=along(0))
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer(x), x @ layer.weight.T), "off, it is the layer that it was"


def test_parameters_stay_the_same_objects_under_the_same_names():
    model = tiny_model("qwen2", **SIZES)
    parameters, names, training = dict(model.named_parameters()), list(model.state_dict()), model.training
    compute_in_float8(model, "float8")
    assert list(model.state_dict()) == names and list(dict(model.named_parameters())) == list(parameters)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert {module.training for module in model.modules()} == {training}


def test_head_routers_and_odd_sizes_are_left_out_and_counted(caplog: pytest.LogCaptureFixture):
    model = tiny_model("llama", hidden_size=64, intermediate_size=72)
    decoder_layers(model)[0].gate = nn.Linear(64, 16)
    with caplog.at_level(logging.INFO, logger=float8.__name__):
        compute_in_float8(model, "float8")
    converted = {n.rpartition(".")[2] for n, m in model.named_modules() if hasattr(m, "switch")}
    assert converted == {"q_proj", "k_proj", "v_proj", "o_proj"}, "72 is no multiple of 16"
    assert "8 linear layers compute in float8, 7 others and the head do not" in caplog.text
    assert "emulated on a CPU" in caplog.text


def test_attached_parameters_stay_where_they_are(saved):
    weights = Given()
    config = ModelConfig.model_validate({"path": str(saved), "device": "cpu", "matmul_dtype": "float8"})
    loaded = load_model(config, NoAdapterConfig(), weights=weights)
    assert {name: p.data_ptr() for name, p in loaded.model.named_parameters()} == weights.places
    assert gradients(make_policy(loaded)).isfinite().all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_logprobs_and_gradients_are_near_those_without(saved, scaling, packing):
    """Three bits of mantissa: about 0.06 nats here, where a fresh model's weights are widened, and 13% of gradients."""
    exact, policy = (make_policy(load(saved, kind), packing=packing) for kind in ("auto", scaling))
    assert policy.plan == exact.plan
    assert torch.equal(logprobs(policy, active=False), logprobs(exact))
    assert 0.01 < (logprobs(policy) - logprobs(exact)).abs().mean() < 0.15
    expected = gradients(exact)
    assert 0.01 < (gradients(policy) - expected).norm() / expected.norm() < 0.3


def test_only_passes_of_the_loss_are_in_float8(saved):
    """The canary keeps its tolerance, π_old is computed as the policy is, and so is a reference that is a copy."""
    exact, policy = make_policy(load(saved, "auto")), make_policy(load(saved, "float8"), beta=0.1)
    assert policy.canary(CANARY) == exact.canary(CANARY)
    metrics = policy.accumulate(batch_for(policy))
    assert metrics["kl_reference"].total == 0, "policy and reference are one network"
    batch = batch_for(policy)
    unknown = [replace(m, old_logprobs=torch.full_like(m.old_logprobs, torch.nan)) for m in batch.micro_batches]
    (micro, *_) = policy.recompute_logprobs(replace(batch, micro_batches=tuple(unknown))).micro_batches
    with policy.loaded.float8.on():
        expected = policy._scores(micro).logprobs
    assert torch.equal(micro.old_logprobs, expected.detach())
    assert policy.canary(CANARY) == exact.canary(CANARY)
    assert not policy.loaded.float8.active
    with pytest.raises(RuntimeError), policy.loaded.float8.on():
        raise RuntimeError
    assert not policy.loaded.float8.active, "off again, whatever happens"


def test_the_proof_of_sync_would_not_hold_of_float8_itself(saved):
    """What the switch is for: float8 differs from an engine's logprobs by more than float32 may."""
    policy = make_policy(load(saved, "float8"))
    with policy.loaded.float8.on():
        inside = policy.canary(CANARY)
    assert max(abs(a - b) for a, b in zip(inside, policy.canary(CANARY), strict=True)) > TOLERANCE["float32"]


def test_gradient_checkpointing_changes_no_gradient(saved):
    plain = gradients(make_policy(load(saved, "float8")))
    policy = make_policy(load(saved, "float8", gradient_checkpointing=True))
    assert policy.transformer.is_gradient_checkpointing
    torch.testing.assert_close(gradients(policy), plain, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_only_the_gradient_of_a_weight_is_added_up_in_float32(scaling, monkeypatch):
    """By rows a product without fast accumulation is scaled in a pass of its own."""
    monkeypatch.setattr(float8, "_check_device", lambda device, scaling: False)
    fast, multiply = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: (fast.append(k["use_fast_accum"]), multiply(*a, **k))[1])
    model = tiny_model("llama", **SIZES).to("meta")
    switch = compute_in_float8(model, scaling)
    x = torch.empty(1, 16, 64, device="meta", requires_grad=True)
    with switch.on():
        decoder_layers(model)[0].mlp.up_proj(x).sum().backward()
    assert fast == [True, True, False], "forward, the gradient of the input, that of the weight"


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
def test_any_number_of_tokens_passes_the_size_checks_of_gpu_kernels(scaling, tokens, monkeypatch):
    """On the meta device nothing is computed, and torch checks strides and sizes as for a GPU."""
    monkeypatch.setattr(float8, "_check_device", lambda device, scaling: False)
    model = tiny_model("llama", **SIZES).to("meta")
    switch = compute_in_float8(model, scaling)
    layer = decoder_layers(model)[0].mlp.up_proj
    x = torch.empty(1, tokens, 64, device="meta", requires_grad=True)
    with switch.on():
        layer(x).sum().backward()
    assert (x.grad.shape, layer.weight.grad.shape) == (x.shape, layer.weight.shape)
    bare = copy.deepcopy(layer)
    bare.linear_mm_config = type(bare.linear_mm_config)()
    if tokens % 16:  # the check that padding is there for
        with switch.on(), pytest.raises(RuntimeError, match=r"divisible by 16|row_major"):
            bare(x).sum().backward()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_tokens_and_zeros_have_finite_results(scaling):
    """Scales are a format's largest number by the largest of a tensor or row, which is 0 of padding."""
    model = tiny_model("llama", **SIZES)
    switch = compute_in_float8(model, scaling)
    layer = decoder_layers(model)[0].mlp.up_proj
    some = torch.randn(4, 64)
    some[1:3] = 0
    for x, given in ((some, torch.randn(4, 128)), (torch.zeros(4, 64), torch.zeros(4, 128)), (some[:0], some[:0])):
        x = x.clone().requires_grad_()
        with switch.on():
            found = layer(x)
            found.backward(given if len(x) else torch.zeros(0, 128))
        assert (found[x.detach().abs().sum(1) == 0] == 0).all()
        assert all(t.isfinite().all() for t in (found, x.grad, layer.weight.grad))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_pad_token_of_zeros_gives_no_nan(saved, scaling, packing):
    """Rows of padding are embeddings of zeros, and with advantages of 0 all incoming gradients are zeros too."""
    loaded = load(saved, scaling)
    with torch.no_grad():
        loaded.transformer.get_input_embeddings().weight[PAD_ID] = 0
    policy = make_policy(loaded, packing=packing)
    found = gradients(policy)
    assert found.isfinite().all() and found.norm() > 0
    policy.optimizer.zero_grad()
    assert (gradients(policy, batch_for(policy, advantage=0.0)) == 0).all()
    with policy.loaded.float8.on():
        micro = idle_micro_batch()
        assert target_logprobs(policy.transformer, micro, plan=policy.plan).logprobs.isfinite().all()
    assert policy.step()["grad_norm"].total == 0


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("adapter", [None, LoraAdapterConfig(r=4)], ids=["full", "lora"])
def test_it_learns_what_is_rewarded_in_16_bits(saved, scaling, adapter):
    policy = make_policy(load(saved, scaling, adapter=adapter, dtype="bfloat16"))
    base = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    batch = batch_for(policy, advantage=1.0)
    before = logprobs(policy, active=False).mean()
    for _ in range(5):
        policy.accumulate(batch)
        policy.step()
    assert logprobs(policy, active=False).mean() > before + 0.5
    assert all(torch.equal(p, base[n]) for n, p in policy.model.named_parameters() if n in base)


def test_adapters_go_around_converted_layers_and_are_none_themselves(saved):
    plain, model = (load(saved, kind, adapter=LoraAdapterConfig(r=16)).model for kind in ("auto", "float8"))
    assert list(model.state_dict()) == list(plain.state_dict())
    converted = [name for name, module in model.named_modules() if hasattr(module, "switch")]
    assert len(converted) == 14 and all(name.endswith("base_layer") for name in converted)


def test_a_model_with_nothing_to_convert_is_refused():
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no linear layer") as caught:
        compute_in_float8(tiny_model("gpt2"), "float8")
    assert caught.value.remedy == "set model.matmul_dtype: auto"


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_float8_products_is_refused(capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    if fits:
        assert float8._check_device(torch.device("cuda"), "float8") is False
        return
    with pytest.raises(ModelError, match=r"compute capability 8\.9 or more .* A100 has 8\.0") as caught:
        float8._check_device(torch.device("cuda"), "float8")
    assert caught.value.remedy == "set model.matmul_dtype: auto"


def test_without_torchao_the_error_says_what_to_install(saved, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else real(name))
    with pytest.raises(DependencyError, match=r"model\.matmul_dtype float8 needs torchao") as caught:
        load(saved, "float8")
    assert "pip install torchao" in caught.value.remedy
