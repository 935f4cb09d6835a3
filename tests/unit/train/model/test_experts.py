from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lachesis.common.errors import ModelError
from lachesis.train.batch import pack
from lachesis.train.model.experts import ExpertRouting, expert_load, load_balancing_loss, stacked_experts, watch_experts
from lachesis.train.model.forward import ForwardPlan, target_logprobs
from lachesis.train.model.loading import LoadedModel
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.model.test_forward import random_groups
from tests.unit.train.test_policy import make_policy

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def logits(*, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, EXPERTS, generator=generator) for _ in range(LAYERS)]


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_that_of_transformers(padded: bool):
    layers = logits(tokens=12)
    valid = torch.tensor([True] * 4 + [False] * 2 + [True] * 5 + [False]) if padded else None
    mask = None if valid is None else valid.view(2, 6).long()
    expected = load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K, mask)
    assert load_balancing_loss(layers, top_k=TOP_K, valid=valid) == pytest.approx(float(expected), rel=1e-6)


def test_experts_that_are_alike_cost_the_least():
    even = [torch.eye(EXPERTS) * 1e-3]
    uneven = [torch.tensor([[1.0, 0, 0, 0]] * EXPERTS)]
    assert load_balancing_loss(even, top_k=1) == pytest.approx(1.0, abs=1e-3)
    assert load_balancing_loss(uneven, top_k=1) > 1.5


def test_load_counts_each_token_at_each_of_its_experts():
    chosen = torch.tensor([[0, 1], [1, 3], [1, 0]])
    assert expert_load(chosen, valid=None, experts=4).tolist() == [2, 3, 0, 1]
    assert expert_load(chosen, valid=torch.tensor([True, False, True]), experts=4).tolist() == [2, 2, 0, 0]


def test_experts_are_found_in_any_mixture_and_in_no_other_model():
    assert len(stacked_experts(tiny_model("qwen3_moe"))) == LAYERS
    assert not stacked_experts(tiny_model("qwen2"))


def test_an_auxiliary_loss_without_known_routers_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("qwen3_moe", output_router_logits=True)
    monkeypatch.setattr(type(model), "_can_record_outputs", {})
    monkeypatch.setattr(type(model.model), "_can_record_outputs", {})
    with pytest.raises(ModelError, match="router_aux_loss_coef: 0"):
        ExpertRouting(model)


def build(*, packing: str = "packed", **config: object) -> Policy:
    model = tiny_model("qwen3_moe", **config).double()
    loaded = LoadedModel(model, model, tiny_tokenizer())
    return make_policy(options=loss_options(), loaded=loaded, packing=packing)


def accumulated(policy: Policy, *, max_tokens: int = 4096) -> tuple[dict[str, float | None], torch.Tensor]:
    """Metrics, and the gradient of a router."""
    groups = random_groups(groups=2, samples=3, longest=6, seed=1)
    metrics = policy.accumulate(pack(groups, max_tokens=max_tokens, share_prefixes=policy.plan.packed))
    gradient = policy.transformer.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert gradient is not None
    return {name: value.value() for name, value in metrics.items()}, gradient


def test_metrics_say_how_even_tokens_are_spread():
    metrics, _ = accumulated(build())
    assert 1 < metrics["expert_load_max"] <= EXPERTS
    assert 0 < metrics["expert_load_entropy"] < 1
    assert "router_aux_loss" not in metrics, "its configuration asks for none"


def test_padding_and_a_reference_are_not_counted():
    """What is shared goes through the experts once where sequences are packed, so that these are not."""
    policy = build(packing="padded")
    accumulated(policy)
    with policy.routing.watched() as seen:
        pass
    assert not seen.chosen
    metrics, _ = accumulated(policy)
    batch = pack(random_groups(groups=2, samples=3, longest=6, seed=1), max_tokens=4096, share_prefixes=False)
    (micro,) = batch.micro_batches
    with policy.routing.watched() as seen:
        target_logprobs(policy.transformer, micro, plan=ForwardPlan("padded", "model"))
    assert seen.chosen[0].shape[0] > micro.num_inputs
    lengths = micro.cu_seq_q.diff()
    valid = torch.cat([torch.arange(micro.max_q) < length for length in lengths])
    loads = [expert_load(chosen, valid=valid, experts=EXPERTS).double() for chosen in seen.chosen]
    assert sum(map(torch.sum, loads)) == LAYERS * TOP_K * micro.num_inputs
    assert metrics["expert_load_max"] == pytest.approx(max(float(x.max() / x.mean()) for x in loads))
    shares = [load / load.sum() for load in loads]
    even = sum(float(torch.special.entr(share).sum()) for share in shares) / LAYERS / math.log(EXPERTS)
    assert metrics["expert_load_entropy"] == pytest.approx(even)


def test_the_auxiliary_loss_is_added_as_the_configuration_says():
    aux = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    plain, without = accumulated(build())
    metrics, gradient = accumulated(build(**aux))
    batch = pack(random_groups(groups=2, samples=3, longest=6, seed=1), max_tokens=4096)
    policy = build(**aux)
    with policy.routing.watched() as seen:
        target_logprobs(policy.transformer, batch.micro_batches[0], plan=policy.plan)
    loss = load_balancing_loss(seen.logits, top_k=TOP_K)
    assert metrics["router_aux_loss"] == pytest.approx(float(loss))
    assert metrics["loss"] == pytest.approx(plain["loss"] + 0.5 * float(loss))
    (0.5 * loss).backward()
    added = policy.transformer.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert torch.allclose(gradient, without + added, atol=1e-12)


def test_of_several_micro_batches_each_counts_by_its_tokens():
    policy = build(output_router_logits=True, router_aux_loss_coef=0.5)
    batch = pack(random_groups(groups=2, samples=3, longest=6, seed=1), max_tokens=8)
    assert len(batch.micro_batches) > 1
    losses, sizes = [], []
    for micro in batch.micro_batches:
        with policy.routing.watched() as seen:
            target_logprobs(policy.transformer, micro, plan=policy.plan)
        losses.append(float(load_balancing_loss(seen.logits, top_k=TOP_K)))
        sizes.append(micro.num_inputs)
    metrics = {name: value.value() for name, value in policy.accumulate(dataclasses.replace(batch)).items()}
    expected = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert metrics["router_aux_loss"] == pytest.approx(expected)


def test_what_each_expert_had_is_added_up_over_ranks():
    """This rank had no token, and another had them all of the first expert in every layer."""
    metrics = build().routing.take(lambda load: load + torch.eye(EXPERTS, dtype=load.dtype)[0])
    assert metrics["expert_load_max"].value() == EXPERTS
    assert metrics["expert_load_entropy"].value() == 0
    assert not build().routing.take()


@pytest.mark.parametrize(
    ("asked", "config", "coefficient"),
    [
        (None, {"router_aux_loss_coef": 0.5}, 0.0),
        (None, {"router_aux_loss_coef": 0.5, "output_router_logits": True}, 0.5),
        ("model", {"router_aux_loss_coef": 0.5}, 0.5),
        (0.25, {"router_aux_loss_coef": 0.5}, 0.25),
        (0.0, {"router_aux_loss_coef": 0.5, "output_router_logits": True}, 0.0),
    ],
)
def test_the_weight_of_the_auxiliary_loss(asked: Any, config: dict[str, Any], coefficient: float):
    routing = watch_experts(tiny_model("qwen3_moe", **config), coefficient=asked)
    assert routing is not None and routing.coefficient == coefficient


def test_a_model_without_experts_has_no_routers_to_balance():
    assert watch_experts(tiny_model("qwen2"), coefficient="model") is None
    with pytest.raises(ModelError, match=r"router_aux_loss_coef is 0.1, but .* has no experts"):
        watch_experts(tiny_model("qwen2"), coefficient=0.1)
