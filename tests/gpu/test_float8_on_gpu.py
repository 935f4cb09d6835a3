"""Float8 products on a real GPU: that they are computed so, near bf16's, and finite. Not part of `make test`.

PYTHONPATH=src python -m pytest tests/gpu/test_float8_on_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig, OptimizerConfig
from lachesis.train.batch import Batch, idle_micro_batch, pack
from lachesis.train.distributed.strategy import SingleDevice
from lachesis.train.model.float8 import Float8Scaling, compute_in_float8
from lachesis.train.model.forward import target_logprobs
from lachesis.train.model.loading import load_model
from lachesis.train.optim.optimizer import build_optimizer
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import PAD_ID, tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups

pytest.importorskip("torchao")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU of compute capability 8.9",
)

SCALINGS = get_args(Float8Scaling)
CANARY = tuple(range(3, 14))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.05}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model("llama", **SIZES).bfloat16().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def make_policy(
    path: Path, scaling: str, *, compiled: bool = False, packing: str = "auto", lora: bool = False, **options
) -> Policy:
    fields = {"path": str(path), "device": "cuda", "dtype": "bfloat16", "matmul_dtype": scaling, **options}
    torch.manual_seed(0)
    torch.compiler.reset()
    loaded = load_model(ModelConfig.model_validate(fields), LoraAdapterConfig(r=16) if lora else NoAdapterConfig())

    def optimizer(parameters):
        return build_optimizer(parameters, config=OptimizerConfig(), learning_rate=1e-3, total_steps=20)

    return Policy(
        loaded,
        strategy=SingleDevice(),
        optimizer_builder=optimizer,
        options=loss_options(),
        packing=packing,
        compile_layers=compiled,
    )


def batch_for(policy: Policy, *, advantage: float = 1.0, max_tokens: int = 1 << 20) -> Batch:
    groups = random_groups(groups=4, samples=4, longest=20)
    groups = [replace(g, samples=tuple(replace(s, advantage=advantage) for s in g.samples)) for g in groups]
    return pack(groups, max_tokens=max_tokens, share_prefixes=policy.plan.packed)


@torch.no_grad()
def logprobs(policy: Policy) -> torch.Tensor:
    """As the loss computes them."""
    micros = [micro.to(policy.device) for micro in batch_for(policy).micro_batches]
    with policy.loaded.float8.on():
        return torch.cat([target_logprobs(policy.transformer, m, plan=policy.plan).logprobs.float() for m in micros])


def gradients(policy: Policy) -> list[torch.Tensor]:
    return [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]


def scaled_products(policy: Policy) -> int:
    """Calls of torch's float8 product in a forward and a backward pass."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        policy.accumulate(batch_for(policy))
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_scaled_mm")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_forward_and_backward_multiply_in_float8(saved, scaling):
    policy = make_policy(saved, scaling)
    assert policy.plan.attention == "flash"
    assert scaled_products(policy) >= 3 * 7 * SIZES["num_hidden_layers"], "three products a layer"
    assert scaled_products(make_policy(saved, "auto")) == 0
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    assert {gradient.dtype for gradient in gradients(policy)} == {torch.bfloat16}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_logprobs_and_gradients_are_near_those_in_bf16(saved, scaling, compiled):
    exact, policy = make_policy(saved, "auto"), make_policy(saved, scaling, compiled=compiled)
    error = (logprobs(policy) - logprobs(exact)).abs()
    assert 1e-3 < error.mean() < 0.3
    for each in (exact, policy):
        each.accumulate(batch_for(each))
    found, expected = (torch.cat([g.flatten().float() for g in gradients(each)]) for each in (policy, exact))
    assert nn.functional.cosine_similarity(found, expected, dim=0) > 0.95


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_canary_is_bf16s_also_when_it_is_a_graph(saved, scaling):
    exact, policy = make_policy(saved, "auto"), make_policy(saved, scaling)
    for _ in range(3):
        assert policy.canary(CANARY) == pytest.approx(exact.canary(CANARY), abs=1e-3)
        policy.accumulate(batch_for(policy))
        policy.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        ("float8", {}),
        ("float8", {"compiled": True}),
        ("float8", {"compiled": True, "gradient_checkpointing": True}),
        ("float8", {"packing": "padded"}),
        ("float8_rowwise", {"lora": True}),
        ("float8_rowwise", {"lora": True, "compiled": True}),
    ],
)
def test_ten_steps_learn_with_finite_gradients(saved, scaling, options):
    policy = make_policy(saved, scaling, **options)
    before = logprobs(policy).mean()
    for step in range(10):
        # Micro-batches of any number of tokens, others at each step.
        policy.accumulate(batch_for(policy, max_tokens=61 + 7 * step))
        norm = policy.step()["grad_norm"].value()
        assert norm is not None and 0 < norm < float("inf")
    assert logprobs(policy).mean() > before + 0.1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_any_number_of_tokens(scaling, compiled):
    """Of a layer alone: against its own products in bf16, forward and backward."""
    torch.compiler.reset()
    model = tiny_model("llama", **SIZES).to("cuda", torch.bfloat16)
    switch = compute_in_float8(model, scaling)
    layer = model.model.layers[0].mlp
    if compiled:
        layer.compile(dynamic=True)
    for tokens in (1, 2, 7, 16, 17, 100, 333, 1000):
        found = []
        for active in (False, True):
            switch.active = active
            torch.manual_seed(tokens)
            x = torch.randn(1, tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            output = layer(x)
            layer.zero_grad()
            output.backward(torch.randn_like(output))
            found.append([output, x.grad, layer.up_proj.weight.grad, layer.down_proj.weight.grad])
        for exact, other in zip(*found, strict=True):
            assert other.isfinite().all()
            assert (other - exact).float().norm() < 0.2 * exact.float().norm(), tokens


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("packing", "compiled"), [("packed", False), ("packed", True), ("padded", False)])
def test_rows_of_zeros_give_no_nan(saved, scaling, packing, compiled):
    policy = make_policy(saved, scaling, compiled=compiled, packing=packing)
    with torch.no_grad():
        policy.transformer.get_input_embeddings().weight[PAD_ID] = 0
    policy.accumulate(batch_for(policy))
    assert all(gradient.isfinite().all() for gradient in gradients(policy))
    policy.optimizer.zero_grad()
    policy.accumulate(batch_for(policy, advantage=0.0))
    assert all((gradient == 0).all() for gradient in gradients(policy))
    with policy.loaded.float8.on(), torch.no_grad():
        micro = idle_micro_batch().to(policy.device)
        assert target_logprobs(policy.transformer, micro, plan=policy.plan).logprobs.isfinite().all()
