"""Invariance: what a step does to the parameters does not depend on how the batch was cut."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from lachesis.config.schema import LoraAdapter, OptimizerConfig
from lachesis.metrics.values import reduce_metrics
from lachesis.train.backends.single import SingleDevice
from lachesis.train.batch import pack
from lachesis.train.loss_options import LossOptions
from lachesis.train.model import LoadedModel, add_lora
from lachesis.train.optimizer import build_optimizer
from lachesis.train.policy import Policy
from lachesis.types import Group
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.test_forward import random_groups

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]


def make_policy(
    *, options: LossOptions, packing: str = "auto", lora: bool = False, architecture: str = "qwen2"
) -> Policy:
    # float64, so that a difference is one of the mathematics and not of rounding.
    transformer = tiny_model(architecture).double()
    torch.manual_seed(0)
    model = add_lora(transformer, LoraAdapter(r=4)).double() if lora else transformer
    return Policy(
        LoadedModel(model=model, transformer=transformer, tokenizer=tiny_tokenizer()),
        backend=SingleDevice(),
        optimizer_builder=partial(
            # SGD-like: with AdamW's division a gradient of rounding noise would become a step of full size.
            build_optimizer,
            config=OptimizerConfig(eps=1.0),
            learning_rate=1e-2,
            total_steps=10,
        ),
        options=options,
        packing=packing,
    )


def parameters_after_step(policy: Policy, groups, **pack_options) -> tuple[torch.Tensor, dict[str, float]]:
    batch = pack(groups, share_prompts=policy.plan.packed, **pack_options)
    metrics = policy.accumulate(batch) | policy.step()
    trained = [p.detach().flatten() for p in policy.model.parameters() if p.requires_grad]
    return torch.cat(trained), reduce_metrics(metrics)


def without_advantage(groups: list[Group]) -> list[Group]:
    return [replace(g, samples=tuple(replace(s, advantage=0.0) for s in g.samples)) for g in groups]


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_step_does_not_depend_on_budget_accumulation_or_order(loss_type, level):
    options = LossOptions(loss_type=loss_type, importance_sampling_level=level, max_completion_length=8)
    groups = random_groups(groups=4, samples=4, longest=8)
    before = torch.cat([p.detach().flatten() for p in make_policy(options=options).model.parameters()])
    whole, metrics = parameters_after_step(make_policy(options=options), groups, max_tokens=1 << 20)
    assert (whole - before).abs().max() > 1e-6, "the step moved nothing: the comparison would be empty"
    shuffled = random.Random(0).sample(groups, len(groups))
    cases = {
        "small budget": (groups, {"max_tokens": 20}),
        "one by one": (groups, {"max_tokens": 1, "max_rows": 1}),
        "row cap": (groups, {"max_tokens": 1 << 20, "max_rows": 3}),
        "other order": (shuffled, {"max_tokens": 30}),
    }
    for name, (these, pack_options) in cases.items():
        found, found_metrics = parameters_after_step(make_policy(options=options), these, **pack_options)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        for metric in ("loss", "mean_ratio", "entropy", "grad_norm", "clipped_fraction"):
            assert found_metrics[metric] == pytest.approx(metrics[metric], rel=1e-5), (name, metric)


def test_packed_equals_padded_rows():
    options = LossOptions()
    groups = random_groups(groups=3, samples=4, longest=8)
    packed, _ = parameters_after_step(make_policy(options=options), groups, max_tokens=40)
    padded, _ = parameters_after_step(make_policy(options=options, packing="padded"), groups, max_tokens=40)
    torch.testing.assert_close(packed, padded, rtol=1e-9, atol=1e-12)


def test_leaving_out_sequences_without_advantage_changes_no_parameter():
    options = LossOptions(loss_type="dapo")
    groups = random_groups(groups=4, samples=4, longest=8)
    mixed = without_advantage(groups[:2]) + groups[2:]
    all_of_them, _ = parameters_after_step(make_policy(options=options), mixed, max_tokens=60)
    policy = make_policy(options=options)
    some, metrics = parameters_after_step(policy, mixed, max_tokens=60, skip_zero_advantage=True)
    assert metrics["skipped_zero_advantage"] == 8
    torch.testing.assert_close(some, all_of_them, rtol=1e-9, atol=1e-12)


def test_kl_pulls_towards_the_base_model():
    """Without a reward signal a KL term brings changed weights back: their KL to the base falls."""
    groups = random_groups(groups=3, samples=4, longest=8)
    silent = without_advantage(groups)
    for lora in (False, True):
        policy = make_policy(options=LossOptions(beta=1.0, use_bias_correction_kl=False), lora=lora)
        with torch.no_grad():
            for parameter in (p for p in policy.model.parameters() if p.requires_grad):
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        divergences = []
        for _ in range(5):
            _, metrics = parameters_after_step(policy, silent, max_tokens=1 << 20)
            divergences.append(metrics["kl_reference"])
        assert divergences[0] > 1e-4
        assert divergences[-1] < 0.9 * divergences[0], (lora, divergences)


def test_canary_is_what_a_plain_pass_computes():
    policy = make_policy(options=LossOptions())
    ids = [5, 9, 13, 20]
    log_p = policy.transformer(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(log_p[i, ids[i + 1]]) for i in range(3)]
    assert policy.canary(ids) == pytest.approx(expected, abs=1e-5)
