"""Invariance: what a step does to the parameters does not depend on how the batch was cut."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from transformers import PreTrainedModel

from lachesis.common.types import UNKNOWN_VERSIONS, Group, VersionSpan
from lachesis.config.schema import AlgorithmConfig, LoraAdapterConfig, OptimizerConfig
from lachesis.metrics.values import reduce_metrics
from lachesis.train.batch import MicroBatch, MicroBatches, pack
from lachesis.train.distributed.strategy import SingleDevice, Strategy
from lachesis.train.losses.covariance import USES_COVARIANCE
from lachesis.train.losses.custom import CustomLoss
from lachesis.train.losses.loss import LOSS_TYPES
from lachesis.train.model.loading import LoadedModel
from lachesis.train.model.lora import add_lora
from lachesis.train.optim.optimizer import build_optimizer
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.train.drifted import drifted_groups, used
from tests.unit.train.model.test_forward import random_groups

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]


def make_policy(
    *,
    options: AlgorithmConfig,
    max_completion_length: int | None = 8,
    packing: str = "auto",
    lora: bool = False,
    architecture: str = "qwen2",
    loaded: LoadedModel | None = None,
    strategy: Strategy | None = None,
    custom_loss: CustomLoss | None = None,
    teachers: dict[str, PreTrainedModel] | None = None,
) -> Policy:
    if loaded is None:
        # float64, so that a difference is one of the mathematics and not of rounding.
        transformer = tiny_model(architecture).double()
        torch.manual_seed(0)
        model = add_lora(transformer, LoraAdapterConfig(r=4)).double() if lora else transformer
        loaded = LoadedModel(model=model, transformer=transformer, tokenizer=tiny_tokenizer())
    return Policy(
        loaded,
        strategy=strategy or SingleDevice(),
        optimizer_builder=partial(
            # SGD-like: with AdamW's division a gradient of rounding noise would become a step of full size.
            build_optimizer,
            config=OptimizerConfig(eps=1.0),
            learning_rate=1e-2,
            total_steps=10,
        ),
        options=options,
        max_completion_length=max_completion_length,
        packing=packing,
        custom_loss=custom_loss,
        teachers=teachers,
    )


def parameters_after_step(policy: Policy, groups, **pack_options) -> tuple[torch.Tensor, dict[str, float]]:
    batch = pack(groups, share_prefixes=policy.plan.packed, **pack_options)
    metrics = policy.accumulate(batch) | policy.step()
    trained = [p.detach().flatten() for p in policy.model.parameters() if p.requires_grad]
    return torch.cat(trained), reduce_metrics(metrics)


def without_advantage(groups: list[Group]) -> list[Group]:
    return [replace(g, samples=tuple(replace(s, advantage=0.0) for s in g.samples)) for g in groups]


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_step_does_not_depend_on_budget_accumulation_or_order(loss_type, level):
    options = loss_options(loss_type=loss_type, importance_sampling_level=level)
    groups = random_groups(groups=4, samples=4, longest=8)
    before = torch.cat([p.detach().flatten() for p in make_policy(options=options).model.parameters()])
    whole, metrics = parameters_after_step(make_policy(options=options), groups, max_tokens=1 << 20)
    assert (whole - before).abs().max() > 1e-6, "the step moved nothing: the comparison would be empty"
    shuffled = random.Random(0).sample(groups, len(groups))
    cases = {
        "small budget, groups split": (groups, {"max_tokens": 20}),
        "one by one": (groups, {"max_tokens": 1, "max_rows": 1}),
        "row cap": (groups, {"max_tokens": 1 << 20, "max_rows": 3}),
        "other order": (shuffled, {"max_tokens": 30}),
    }
    for name, (these, pack_options) in cases.items():
        found, found_metrics = parameters_after_step(make_policy(options=options), these, **pack_options)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        for metric in ("loss", "mean_ratio", "entropy", "grad_norm", "clipped_fraction"):
            assert found_metrics[metric] == pytest.approx(metrics[metric], rel=1e-9), (name, metric)


def test_packed_equals_padded_rows():
    options = loss_options()
    groups = random_groups(groups=3, samples=4, longest=8)
    packed, _ = parameters_after_step(make_policy(options=options), groups, max_tokens=40)
    padded, _ = parameters_after_step(make_policy(options=options, packing="padded"), groups, max_tokens=40)
    torch.testing.assert_close(packed, padded, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_leaving_out_sequences_without_advantage_changes_no_parameter(loss_type: str):
    """A choice by covariance needs the tokens of all sequences, so that it leaves none out."""
    options = loss_options(loss_type=loss_type, cov_share=0.2, cov_low=0.0)
    groups = random_groups(groups=4, samples=4, longest=8)
    mixed = without_advantage(groups[:2]) + groups[2:]
    all_of_them, _ = parameters_after_step(make_policy(options=options), mixed, max_tokens=60)
    policy = make_policy(options=options)
    skips = policy.ignores_zero_advantage
    some, metrics = parameters_after_step(policy, mixed, max_tokens=60, skip_zero_advantage=skips)
    assert metrics.get("skipped_zero_advantage", 0) == (0 if loss_type in USES_COVARIANCE else 8)
    torch.testing.assert_close(some, all_of_them, rtol=1e-9, atol=1e-12)


def test_kl_pulls_towards_the_base_model():
    """Without a reward signal a KL term brings changed weights back: their KL to the base falls."""
    groups = random_groups(groups=3, samples=4, longest=8)
    silent = without_advantage(groups)
    for lora in (False, True):
        policy = make_policy(options=loss_options(beta=1.0, use_bias_correction_kl=False), lora=lora)
        with torch.no_grad():
            for parameter in (p for p in policy.model.parameters() if p.requires_grad):
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        divergences = []
        for _ in range(5):
            _, metrics = parameters_after_step(policy, silent, max_tokens=1 << 20)
            divergences.append(metrics["kl_reference"])
        assert divergences[0] > 1e-4
        assert divergences[-1] < 0.9 * divergences[0], (lora, divergences)


def sampled_at(groups: list[Group], *spans: VersionSpan) -> list[Group]:
    """The groups, each sampled under one of the spans."""
    pairs = zip(groups, spans, strict=True)
    return [replace(g, samples=tuple(replace(s, versions=span) for s in g.samples)) for g, span in pairs]


def shifted(groups: list[Group], by: float) -> list[Group]:
    """The groups with all their logprobs off by a constant."""
    return [
        replace(g, samples=tuple(replace(s, logprobs=tuple(p + by for p in s.logprobs)) for s in g.samples))
        for g in groups
    ]


class TestAlignment:
    """Trainer and engine are compared on what the weights of now have sampled, and on nothing else."""

    def differences(self, groups: list[Group], *, steps: int = 0, **packing: int) -> tuple[float | None, float | None]:
        policy = make_policy(options=loss_options())
        for _ in range(steps):
            policy.step()
        batch = pack(groups, max_tokens=packing.get("max_tokens", 1 << 20))
        metrics = reduce_metrics(policy.accumulate(batch))
        return metrics.get("logprob_diff_mean"), metrics.get("logprob_diff_max")

    @pytest.fixture
    def exact(self) -> list[Group]:
        """Three groups with the trainer's own logprobs."""
        return drifted_groups(tiny_model().double(), groups=3, noise=0.0)

    def test_stale_tokens_do_not_count(self, exact: list[Group]):
        mixed = [*exact[:1], *shifted(exact[1:], 0.5)]
        stale = sampled_at(mixed, VersionSpan(2, 2), VersionSpan(1, 1), VersionSpan(0, 0))
        for budget in (1 << 20, 12):  # in one micro-batch, and in many of which some have no fresh token
            mean, largest = self.differences(stale, steps=2, max_tokens=budget)
            assert mean == pytest.approx(0.0, abs=1e-5)
            assert largest == pytest.approx(0.0, abs=1e-5)

    def test_fresh_tokens_do(self, exact: list[Group]):
        mixed = [*exact[:1], *shifted(exact[1:], 0.5)]
        fresh = sampled_at(mixed, VersionSpan(1, 1), VersionSpan(2, 2), VersionSpan(2, 2))
        assert self.differences(fresh, steps=2) == (pytest.approx(0.5, abs=1e-5), pytest.approx(0.5, abs=1e-5))

    @pytest.mark.parametrize("span", [VersionSpan(1, 1), VersionSpan(1, 2), UNKNOWN_VERSIONS])
    def test_where_nothing_is_fresh_there_is_nothing_to_say(self, exact: list[Group], span: VersionSpan):
        """Neither of old samples, nor of those that were in flight at an update, nor of unknown ones."""
        assert self.differences(sampled_at(shifted(exact, 0.5), span, span, span), steps=2) == (None, None)

    def test_a_second_use_of_a_batch_is_not_compared(self, exact: list[Group]):
        policy, batch = make_policy(options=loss_options()), pack(shifted(exact, 0.5), max_tokens=1 << 20)
        for iteration, said in ((0, True), (1, False)):
            metrics = reduce_metrics(policy.accumulate(used(batch, iteration, of=2)) | policy.step())
            assert ("logprob_diff_mean" in metrics) is said


def test_canary_is_what_a_plain_pass_computes():
    policy = make_policy(options=loss_options())
    ids = [5, 9, 13, 20]
    log_p = policy.transformer(input_ids=torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    expected = [float(log_p[i, ids[i + 1]]) for i in range(3)]
    assert policy.canary(ids) == pytest.approx(expected, abs=1e-5)


def test_the_canary_sees_the_adapter():
    policy, ids = make_policy(options=loss_options(), lora=True), [5, 9, 13, 20]
    before = policy.canary(ids)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    assert policy.canary(ids) != pytest.approx(before, abs=1e-3)


class BusierRank(SingleDevice):
    """One of two ranks, the other of which has more to do. Values of both are as if they were equal."""

    def __init__(self, micro_batches: int = 0) -> None:
        self.micro_batches = micro_batches
        self.asked: list[int] = []

    def max_count(self, count: int) -> int:
        self.asked.append(count)
        return max(count, self.micro_batches)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("quantile", [1.0, 0.4])
def test_a_rank_without_advantages_takes_part_in_every_pass_of_the_others(beta: float, quantile: float):
    """A constant loss in place of the pass would leave sharded ranks waiting for this one's collectives."""
    options = loss_options(loss_type="dapo", beta=beta, top_entropy_quantile=quantile)
    silent = without_advantage(random_groups(groups=2, samples=3, longest=6))
    batch = pack(silent, max_tokens=100, skip_zero_advantage=True)
    assert len(batch.micro_batches) == 0
    policy = make_policy(options=options, strategy=(strategy := BusierRank(micro_batches=2)), lora=True)
    backward, forward = [], []
    policy.transformer.base_model.register_forward_hook(lambda module, args, output: forward.append(module))
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: backward.append(float(grad.abs().max())))
            break
    metrics = reduce_metrics(policy.accumulate(batch))
    assert strategy.asked == [0]
    assert len(forward) == 2 * (1 + (beta > 0) + (quantile < 1)), "policy, reference and entropy passes"
    assert len(backward) == 2
    assert set(backward) == {0.0}
    assert all(float(p.grad.abs().max()) == 0 for p in policy.model.parameters() if p.grad is not None)
    assert metrics["loss"] == 0.0
    assert metrics["micro_batches"] == 0


def test_a_micro_batch_is_made_while_the_one_before_is_worked_on():
    """All of them at once are made while a GPU has nothing to do."""
    policy, order = make_policy(options=loss_options()), []
    batch = pack(random_groups(groups=3, samples=3, longest=6), max_tokens=8)
    assert len(batch.micro_batches) > 2

    def told(index: int) -> MicroBatch:
        order.append(("made", index))
        return batch.micro_batches[index]

    policy.transformer.base_model.register_forward_hook(lambda *_: order.append(("forward", len(order) // 2)))
    told_of = MicroBatches(cache(partial(told, index)) for index in range(len(batch.micro_batches)))
    policy.accumulate(replace(batch, micro_batches=told_of))
    assert order == [(what, index) for index in range(len(batch.micro_batches)) for what in ("made", "forward")]


def test_idle_passes_change_no_gradient():
    groups = random_groups(groups=2, samples=3, longest=6)
    alone, _ = parameters_after_step(make_policy(options=loss_options()), groups, max_tokens=30)
    busy = make_policy(options=loss_options(), strategy=BusierRank(micro_batches=9))
    found, metrics = parameters_after_step(busy, groups, max_tokens=30)
    assert torch.equal(found, alone)
    assert metrics["mean_ratio"] > 0


def test_where_no_rank_has_anything_to_learn_nothing_moves():
    policy = make_policy(options=loss_options())
    silent = without_advantage(random_groups(groups=2, samples=3, longest=6))
    before = torch.cat([p.detach().flatten().clone() for p in policy.model.parameters()])
    found, metrics = parameters_after_step(policy, silent, max_tokens=100, skip_zero_advantage=True)
    assert torch.equal(found, before)
    assert (metrics["loss"], metrics["grad_norm"], metrics["skipped_zero_advantage"]) == (0.0, 0.0, 6)


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.1}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}, *({"loss_type": n} for n in USES_COVARIANCE)],
    ids=str,
)
def test_with_another_term_than_the_advantages_no_row_may_be_left_out(options: dict):
    assert loss_options().ignores_zero_advantage
    assert not loss_options(**options).ignores_zero_advantage


def test_the_entropy_quantile_is_one_of_all_ranks():
    class Twin(SingleDevice):
        """The other rank's tokens are all surer than this one's."""

        def gather_values(self, values):
            return torch.cat([values, torch.zeros_like(values)])

    groups = random_groups(groups=2, samples=3, longest=6)
    options = loss_options(loss_type="dapo", top_entropy_quantile=0.5)
    batch = pack(groups, max_tokens=100)
    policy = make_policy(options=options, strategy=Twin())
    counts = policy._count(batch, batch.micro_batches)
    assert counts.num_high_entropy_tokens == batch.num_tokens, "the upper half of all is the whole of this rank"
    alone = make_policy(options=options)._count(batch, batch.micro_batches)
    assert alone.entropy_threshold > counts.entropy_threshold
