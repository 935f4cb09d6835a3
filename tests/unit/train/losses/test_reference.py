"""What the KL term compares with: that it stays, follows, is restored, and leaves the policy as it was."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from lachesis.common.errors import CheckpointError
from lachesis.metrics.values import reduce_metrics
from lachesis.train.batch import MicroBatch, pack
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model
from tests.unit.train.drifted import drifted_groups
from tests.unit.train.test_policy import make_policy

EMA = {"kl_reference": "ema", "ref_mixup_alpha": 0.25, "ref_sync_steps": 2}
both_adapters = pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])


def policy_with(reference: dict[str, Any], *, lora: bool = False) -> Policy:
    return make_policy(options=loss_options(beta=0.5, **reference), lora=lora)


def micro_batch() -> MicroBatch:
    (micro,) = pack(drifted_groups(tiny_model().double(), groups=2), max_tokens=1 << 20).micro_batches
    return micro


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p for name, p in policy.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def move(policy: Policy, amount: float, *, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(policy).values():
        parameter += amount * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def own_logprobs(policy: Policy, micro: MicroBatch) -> torch.Tensor:
    return policy._scores(micro).logprobs


@both_adapters
def test_the_base_stays_while_the_policy_moves(lora: bool):
    policy, micro = policy_with({}, lora=lora), micro_batch()
    before = own_logprobs(policy, micro)
    move(policy, 0.1)
    moved = own_logprobs(policy, micro)
    assert not torch.allclose(moved, before)
    torch.testing.assert_close(policy.reference.logprobs(micro), before, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(own_logprobs(policy, micro), moved, rtol=0, atol=0)


@both_adapters
def test_an_average_follows_every_n_steps(lora: bool):
    """ref ← alpha·policy + (1 - alpha)·ref: alpha is the weight of the policy, as in TRL."""
    policy, micro = policy_with(EMA, lora=lora), micro_batch()
    start = {name: p.detach().clone() for name, p in trained(policy).items()}
    move(policy, 0.1)
    now = {name: p.detach().clone() for name, p in trained(policy).items()}
    before = policy.reference.logprobs(micro)
    policy.reference.after_step(1)
    assert torch.equal(policy.reference.logprobs(micro), before)
    policy.reference.after_step(2)
    found = policy.reference.logprobs(micro)
    with torch.no_grad():
        for name, parameter in trained(policy).items():
            parameter.copy_(0.25 * now[name] + 0.75 * start[name])
    torch.testing.assert_close(found, own_logprobs(policy, micro), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found, before)


@both_adapters
def test_optimizer_steps_are_counted_over_the_run(lora: bool):
    policy, micro = policy_with(EMA, lora=lora), micro_batch()
    groups = drifted_groups(tiny_model().double(), groups=2)
    seen = []
    for _ in range(4):
        policy.accumulate(pack(groups, max_tokens=1 << 20))
        policy.step()
        seen.append(policy.reference.logprobs(micro))
    moves = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert moves == [True, False, True]


def test_an_averaged_adapter_takes_its_place_and_leaves_no_trace():
    policy, micro = policy_with(EMA, lora=True), micro_batch()
    move(policy, 0.1)
    storage = {name: p.data_ptr() for name, p in trained(policy).items()}
    names, before = set(policy.model.state_dict()), own_logprobs(policy, micro)
    policy.model.train()
    policy.reference.logprobs(micro)
    assert policy.model.training
    assert {name: p.data_ptr() for name, p in trained(policy).items()} == storage
    assert set(policy.model.state_dict()) == names, "what is saved is the adapter alone"
    assert torch.equal(own_logprobs(policy, micro), before)


@both_adapters
def test_an_average_goes_on_exactly_after_a_restart(lora: bool):
    policy, micro = policy_with(EMA, lora=lora), micro_batch()
    move(policy, 0.1)
    policy.reference.after_step(2)
    expected = policy.reference.logprobs(micro)
    saved = {name: value.clone() for name, value in policy.state_dict()["reference"].items()}

    resumed = policy_with(EMA, lora=lora)
    move(resumed, 0.3, seed=2)
    resumed.load_state_dict({"reference": saved, "old_logprobs": []})
    torch.testing.assert_close(resumed.reference.logprobs(micro), expected, rtol=0, atol=0)


@both_adapters
def test_a_base_needs_nothing_saved(lora: bool):
    assert policy_with({}, lora=lora).state_dict() == {"reference": {}, "kl_weight": 0.5, "old_logprobs": []}


def test_a_checkpoint_of_another_reference_is_refused():
    saved = policy_with(EMA).state_dict()
    for other in ({}, {"kl_reference": "sampler"}):
        with pytest.raises(CheckpointError, match=r"KL reference does not fit: \d+ tensors differ"):
            policy_with(other).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="does not fit"):
        policy_with(EMA, lora=True).load_state_dict(saved)


def test_the_sampler_as_reference_is_what_the_samples_came_with():
    """Atropos calls this the reference model. Unknown logprobs add nothing to the KL."""
    policy = make_policy(options=loss_options(beta=1.0, use_bias_correction_kl=False, kl_reference="sampler"))
    (micro,) = (batch := pack(drifted_groups(tiny_model().double()), max_tokens=1 << 20)).micro_batches
    current = own_logprobs(policy, micro)
    difference = (micro.sampling_logprobs - current).nan_to_num(0.0)
    expected = (difference.exp() - difference - 1).sum() / difference.numel()
    assert micro.sampling_logprobs.isnan().any()
    assert reduce_metrics(policy.accumulate(batch))["kl_reference"] == pytest.approx(float(expected), rel=1e-5)
    assert policy.state_dict()["reference"] == {}


@both_adapters
def test_without_kl_no_reference_is_held(lora: bool):
    for kind in ("base", "ema", "sampler"):
        policy = make_policy(options=loss_options(kl_reference=kind), lora=lora)
        assert policy.reference is None
