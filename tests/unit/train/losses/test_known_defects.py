"""Defects that other trainers have or had, each as a test of what happens here instead.

All of them through the policy where they concern it, so that the wiring is tested and not only the formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.metrics.values import reduce_metrics
from lachesis.pipeline.feed import Finisher
from lachesis.train.batch import Batch, pack
from lachesis.train.losses.advantage import assign_advantages, group_advantages
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model
from tests.unit.train.drifted import drifted_groups, tokens_of, used
from tests.unit.train.model.test_forward import plain_logprobs
from tests.unit.train.test_policy import make_policy, without_advantage

NAN = math.nan


@torch.no_grad()
def group_of(
    completions: Sequence[Sequence[int]],
    *,
    advantages: Sequence[float],
    log_ratios: Sequence[float] | None = None,
    temperature: float = 1.0,
    finish: Sequence[str] | None = None,
) -> Group:
    """Samples whose sampler's logprobs are the tiny model's less ``log_ratios`` (one a completion)."""
    samples = []
    for i, ids in enumerate(completions):
        sample = Sample((5, 6, 7), tuple(ids), (), "stop", VersionSpan(0, 0), temperature=temperature)
        own = plain_logprobs(tiny_model().double(), sample) - (log_ratios[i] if log_ratios else 0.0)
        samples.append(
            replace(
                sample,
                logprobs=tuple(own.tolist()),
                advantage=advantages[i],
                finish_reason=finish[i] if finish else "stop",
            )
        )
    return Group(Prompt("0", (5, 6, 7), ""), tuple(samples))


def learn(policy: Policy, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    metrics = reduce_metrics(policy.accumulate(batch))
    found = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    policy.optimizer.zero_grad()
    return found, metrics


def one_step(
    groups: Sequence[Group], *, packing: dict | None = None, max_completion_length: int = 8, **options
) -> tuple[torch.Tensor, dict]:
    policy = make_policy(options=loss_options(**options), max_completion_length=max_completion_length)
    return learn(policy, pack(groups, max_tokens=1 << 20, **(packing or {})))


def moved(policy: Policy) -> Policy:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    return policy


TRAINER = {"old_logprobs": "trainer"}


class TestClip:
    @pytest.mark.parametrize(("log_ratio", "advantage", "moves"), [(0.5, -1.0, True), (-0.5, -1.0, False)])
    def test_a_negative_advantage_does_not_invert_the_clip(self, log_ratio, advantage, moves):
        """Atropos takes the maximum there: what drifted towards a bad answer would stay there."""
        group = group_of([(8, 9)], advantages=[advantage], log_ratios=[log_ratio])
        gradient, metrics = one_step([group])
        assert (float(gradient.abs().max()) > 1e-9) is moves
        assert metrics["clipped_fraction"] == (not moves)

    def test_delta_bounds_the_loss_of_bad_answers(self):
        group = group_of([(8, 9)], advantages=[-1.0], log_ratios=[3.0])
        free, bounded = (one_step([group], delta=delta)[1]["loss"] for delta in (None, 2.0))
        assert free == pytest.approx(math.exp(3.0), rel=1e-5)
        assert bounded == pytest.approx(2.0)


class TestAdvantages:
    def test_a_small_spread_is_not_blown_up(self):
        """Atropos divides by max(population deviation, 1e-8); here it is the sample deviation + 1e-4, as in TRL."""
        rewards = torch.tensor([[0.0], [1e-6]], dtype=torch.float64)
        found = group_advantages(rewards, group=torch.zeros(2, dtype=torch.int64))
        assert found.abs().max() < 0.01
        wide = group_advantages(rewards * 1e6, group=torch.zeros(2, dtype=torch.int64))
        assert wide[1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))

    def test_a_reward_that_no_function_gave_is_not_zero(self):
        """axolotl counts it as 0, which lowers the baseline of the others."""
        rewards = torch.tensor([[1.0], [1.0], [NAN]], dtype=torch.float64)
        assert group_advantages(rewards, group=torch.zeros(3, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize(
        "how", [{"scale_rewards": "batch"}, {"aggregation": "normalize_then_sum"}], ids=lambda how: next(iter(how))
    )
    def test_the_batch_is_the_whole_batch(self, how: dict):
        """axolotl's streaming takes a chunk of groups for the batch."""
        rewards = torch.tensor([[0.0], [1.0], [0.0], [10.0]], dtype=torch.float64)
        group = torch.tensor([0, 0, 1, 1])
        whole = group_advantages(rewards, group=group, **how)
        chunks = [group_advantages(rewards[i : i + 2], group=group[i : i + 2], **how) for i in (0, 2)]
        assert not torch.allclose(whole, torch.cat(chunks))


class TestSamplerCorrection:
    @pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
    def test_mask_modes_mask_with_a_floor_too(self, mode: str):
        """axolotl clamps to 1/cap after masking: what was masked comes back with that weight."""
        group = group_of([(8, 9), (10, 11)], advantages=[1.0, 1.0], log_ratios=[3.0, 0.0])
        kept = replace(group, samples=(replace(group.samples[0], mask=(0, 0)), group.samples[1]))
        options = {"sampler_correction": mode, "sampler_correction_min": 1 / 3}
        found, metrics = one_step([group], packing=TRAINER, **options)
        expected, _ = one_step([kept], packing=TRAINER, **options)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        assert metrics["sampling_ratio"] == pytest.approx(0.5)

    def test_an_unknown_logprob_is_a_ratio_of_one(self):
        group = group_of([(8, 9)], advantages=[1.0])
        unknown = replace(group, samples=(replace(group.samples[0], logprobs=(NAN, NAN)),))
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
            found, metrics = one_step([unknown], packing=TRAINER, sampler_correction=mode)
            assert metrics["sampling_ratio"] == 1.0
            assert found.isfinite().all()
            assert metrics["mean_ratio"] == 1.0

    def test_the_correction_is_of_the_old_policy_and_not_of_the_current(self):
        """π_old/s: a constant of the batch, without gradient, whatever is learned from it meanwhile."""
        policy = make_policy(options=loss_options(sampler_correction="token_truncate"))
        group = group_of([(8, 9), (10, 11)], advantages=[1.0, -1.0], log_ratios=[0.5, -0.5])
        batch = pack([group], max_tokens=100, **TRAINER)
        seen = []
        for iteration in range(2):
            policy.accumulate(used(batch, iteration, of=3))
            policy.step()
            seen.append(reduce_metrics(policy.accumulate(used(batch, 2, of=3)))["sampling_ratio"])
        expected = (math.exp(0.5) + math.exp(-0.5)) / 2
        assert seen == pytest.approx([expected, expected], rel=1e-5)


class TestOffPolicyMask:
    """OPSM: of the sequences with A < 0, those that the policy has drifted away from are left out."""

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_temperature_is_no_drift(self, temperature: float):
        """axolotl recomputes logprobs without temperature: all that is sampled at another one looks off-policy."""
        group = group_of([(8, 9), (10, 11)], advantages=[-1.0, 1.0], temperature=temperature)
        masked, _ = one_step([group], off_policy_mask_threshold=1e-4)
        plain, _ = one_step([group])
        torch.testing.assert_close(masked, plain)

    def test_drift_is_measured_against_the_sampler(self):
        """Against π_old, which is the policy itself at the first use, nothing ever drifts."""
        group = group_of([(8, 9)], advantages=[-1.0], log_ratios=[-0.5])
        options = {"off_policy_mask_threshold": 0.1, "sampler_correction": "none"}
        for packing in ({}, TRAINER):
            gradient, _ = one_step([group], packing=packing, **options)
            assert float(gradient.abs().max()) == 0.0
        gradient, _ = one_step([group_of([(8, 9)], advantages=[-1.0])], **options)
        assert float(gradient.abs().max()) > 0.0


class TestKl:
    def test_masks_do_not_remove_it(self):
        group = group_of([(8, 9)], advantages=[-1.0], log_ratios=[-0.5])
        policy = moved(make_policy(options=loss_options(beta=0.5, off_policy_mask_threshold=0.1)))
        gradient, metrics = learn(policy, pack([group], max_tokens=100, **TRAINER))
        assert metrics["loss"] == pytest.approx(0.5 * metrics["kl_reference"], rel=1e-5)
        assert float(gradient.abs().max()) > 1e-6

    def test_rows_without_advantage_keep_it(self):
        """axolotl skips micro-batches without advantages and loses their KL."""
        policy = moved(make_policy(options=loss_options(beta=0.5)))
        silent = without_advantage(drifted_groups(tiny_model().double(), groups=1))
        batch = pack(silent, max_tokens=100, skip_zero_advantage=policy.ignores_zero_advantage)
        assert batch.skipped_sequences == 0
        gradient, _ = learn(policy, batch)
        assert float(gradient.abs().max()) > 1e-6

    def test_the_bias_correction_is_a_choice(self):
        """TRL 1.10 and axolotl leave it out, TRL 1.16 has it; times r the k3 estimate is unbiased off-policy."""
        batch = pack(drifted_groups(tiny_model().double(), groups=1), max_tokens=100)
        policies = [make_policy(options=loss_options(beta=0.5, use_bias_correction_kl=use)) for use in (True, False)]
        with_it, without = (learn(moved(policy), batch)[1]["kl_reference"] for policy in policies)
        assert with_it != pytest.approx(without, rel=1e-3)

    def test_the_sampler_is_no_base_model(self):
        """Atropos calls the sampler's logprobs the reference: nothing holds the policy near its start."""
        found = {}
        for kind in ("base", "sampler"):
            policy = moved(make_policy(options=loss_options(beta=1.0, kl_reference=kind)))
            fresh = drifted_groups(policy.transformer, groups=1, noise=0.0)
            found[kind] = learn(policy, pack(fresh, max_tokens=100))[1]["kl_reference"]
        assert found["sampler"] == pytest.approx(0.0, abs=1e-6)
        assert found["base"] > 1e-3

    def test_an_average_works_with_an_adapter(self):
        """TRL refuses sync_ref_model with PEFT."""
        options = loss_options(beta=1.0, kl_reference="ema", ref_mixup_alpha=1.0, ref_sync_steps=1)
        policy = make_policy(options=options, lora=True)
        batch = pack(drifted_groups(tiny_model().double(), groups=1), max_tokens=100)
        assert len(policy.state_dict()["reference"]) == len([p for p in policy.model.parameters() if p.requires_grad])
        policy.accumulate(batch)
        policy.step()
        assert learn(policy, batch)[1]["kl_reference"] == pytest.approx(0.0, abs=1e-9), "it has caught up"


class TestCounts:
    @pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
    def test_truncated_rows_count_as_in_trl(self, loss_type: str):
        """Masked rows leave the tokens and stay among the sequences; the rewards have made the baseline before."""
        group = group_of([(8, 9), (10, 11)], advantages=[1.0, -1.0], finish=["stop", "length"])
        options = {"loss_type": loss_type, "max_completion_length": 4}
        found, metrics = one_step([group], packing={"mask_truncated": True}, **options)
        share = {"grpo": 1 / 2, "sapo": 1 / 2, "dr_grpo": 2 / 8}.get(loss_type, 1.0)
        alone = Group(group.prompt, group.samples[:1])
        expected, _ = one_step([alone], **(options | {"max_completion_length": 2}))
        torch.testing.assert_close(found, share * expected, rtol=1e-5, atol=1e-9)
        assert metrics["tokens_trained"] == 2

    def test_a_truncated_answer_still_shapes_the_baseline(self):
        rewards = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
        advantages = group_advantages(rewards, group=torch.zeros(2, dtype=torch.int64)).tolist()
        assert advantages[0] > 0
        group = group_of([(8, 9), (10, 11)], advantages=advantages, finish=["stop", "length"])
        gradient, _ = one_step([group], packing={"mask_truncated": True})
        assert float(gradient.abs().max()) > 0

    @pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo"])
    def test_accumulation_does_not_rescale_the_loss(self, loss_type: str):
        """axolotl's dapo denominator ignores accumulation (trl#6024), and bnpo's mean is of each micro-batch."""
        groups = drifted_groups(tiny_model().double())
        options = loss_options(loss_type=loss_type, sampler_correction="none")
        whole, cut = (
            learn(make_policy(options=options), pack(groups, max_tokens=budget))[1]["loss"] for budget in (1 << 20, 12)
        )
        assert cut == pytest.approx(whole, rel=1e-4)


class TestReplay:
    def test_nothing_about_a_replayed_group_is_stale(self):
        """axolotl recomputes π_old alone: its correction stays that of the first time."""
        policy = make_policy(options=loss_options(sampler_correction="token_truncate"))
        groups = [replace(g, replaces=g) for g in drifted_groups(policy.transformer, groups=1, noise=0.1)]
        packing = {"old_logprobs": "trainer", "replayed_old_logprobs": "trainer"}
        first = reduce_metrics(policy.accumulate(pack(groups, max_tokens=100, **packing)))
        moved(policy)
        batch = pack(groups, max_tokens=100, **packing)
        with torch.no_grad():
            (micro,) = batch.micro_batches
            drift = (policy._scores(micro).logprobs - tokens_of(batch, "sampling_logprobs")).nan_to_num(0.0)
        again = reduce_metrics(policy.accumulate(batch))
        assert again["mean_ratio"] == 1.0
        assert again["sampling_ratio"] == pytest.approx(float(drift.exp().clamp(max=3).mean()), rel=1e-5)
        assert again["sampling_ratio"] != pytest.approx(first["sampling_ratio"], rel=1e-3)


class TestCispo:
    def test_no_token_loses_its_gradient(self):
        """Where the clip would cut a token off, its weight is capped and it goes on learning."""
        group = group_of([(8, 9)], advantages=[1.0], log_ratios=[3.0])
        clipped, _ = one_step([group])
        capped, _ = one_step([group], loss_type="cispo", epsilon_high=5.0)
        assert float(clipped.abs().max()) == 0.0
        on_policy, _ = one_step([group_of([(8, 9)], advantages=[5.0])], loss_type="cispo", epsilon_high=5.0)
        torch.testing.assert_close(capped, on_policy, rtol=1e-3, atol=1e-5)


class TestWiring:
    @pytest.mark.parametrize(
        ("packing", "options"),
        [
            ({}, {"off_policy_mask_threshold": 0.1, "sampler_correction": "none"}),
            ({}, {"top_entropy_quantile": 0.5, "sampler_correction": "none"}),
            (TRAINER, {"sampler_correction": "token_mask"}),
            (TRAINER, {"sampler_correction": "sequence_mask"}),
        ],
        ids=["off-policy", "entropy", "token", "sequence"],
    )
    def test_the_kl_term_is_added_after_every_mask_and_weight(self, packing: dict, options: dict):
        """What beta adds to the gradient is the same whatever the rest of the loss is multiplied by."""
        group = group_of([(8, 9, 10), (11, 12, 13)], advantages=[-1.0, 1.0], log_ratios=[-0.5, 3.0])
        batch = pack([group], max_tokens=100, **packing)
        plain = {"sampler_correction": "none"}

        def gradient(beta: float, **changes) -> torch.Tensor:
            # Without a clip, which would take the gradient of these tokens away by itself.
            options = loss_options(beta=beta, epsilon=1e3, **changes)
            return learn(moved(make_policy(options=options)), batch)[0]

        without_kl, unmasked = gradient(0.0, **options), gradient(0.0, **plain)
        assert not torch.allclose(without_kl, unmasked), "the mask did nothing"
        kl = gradient(0.5, **plain) - unmasked
        assert kl.abs().max() > 1e-3
        difference = gradient(0.5, **options) - without_kl
        torch.testing.assert_close(difference, kl, rtol=0, atol=1e-4 * float(kl.abs().max()))

    def test_a_truncated_answer_is_masked_only_after_its_reward_has_counted(self):
        """The other order would leave the right answer alone in its group, with nothing to be better than."""
        group = group_of([(8, 9), (10, 11)], advantages=[0.0, 0.0], finish=["stop", "length"])
        rewarded = tuple(replace(s, rewards=(r,), reward=r) for s, r in zip(group.samples, (1.0, 0.0), strict=True))

        def compute(rewards, number, lengths) -> list[float]:
            found = group_advantages(torch.tensor(rewards, dtype=torch.float64), group=torch.tensor(number))
            return found.tolist()

        finisher = Finisher(
            advantages=partial(assign_advantages, compute=compute),
            pack=partial(pack, max_tokens=100, mask_truncated=True),
        )
        (micro,) = finisher.finish([replace(group, samples=rewarded)]).micro_batches
        assert micro.targets.tolist() == [8, 9]
        assert micro.advantages.tolist() == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4)])
