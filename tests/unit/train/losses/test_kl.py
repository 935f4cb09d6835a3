"""KL in the reward and its adaptive weight, against the formulas of verl, TRL and OpenRLHF written out here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import AlgorithmConfig
from lachesis.metrics.values import Mean, reduce_metrics
from lachesis.train.batch import pack
from lachesis.train.losses.kl import ESTIMATORS, KlInReward, KlWeight
from tests.unit.train.drifted import drifted_groups
from tests.unit.train.model.test_forward import plain_logprobs
from tests.unit.train.test_policy import make_policy
from tests.unit.train.test_resume import checkpoints

BETA = 0.1
REWARDS = ((1.0, 0.0, 0.5), (0.25, 1.0))
# log π_old - log π_ref of the counted tokens, by group and completion.
RATIOS = (((0.3, -0.2, 0.5), (0.1,), (-0.4, 0.6)), ((0.2, 0.2), (-0.3, 0.1, 0.7, 0.05)))


def groups_of(rewards: tuple[tuple[float | None, ...], ...] = REWARDS) -> list[Group]:
    return [
        Group(Prompt(str(g), (1, 2), ""), tuple(
            Sample((1, 2), tuple(range(len(ratios))), (-1.0,) * len(ratios), "stop", VersionSpan(0, 0),
                   rewards=(reward,), reward=reward)
            for reward, ratios in zip(of_group, RATIOS[g], strict=True)
        ))
        for g, of_group in enumerate(rewards)
    ]  # fmt: skip


def assigned(groups: list[Group], beta: KlWeight | None = None, **options: Any) -> list[Group]:
    algorithm = AlgorithmConfig(beta=BETA, **options)
    ratios = [[torch.tensor(values, dtype=torch.float64) for values in of_group] for of_group in RATIOS]
    return KlInReward(algorithm, None, lambda given: ratios, beta or KlWeight.of(algorithm))(groups)


def by_token(groups: list[Group]) -> list[list[float]]:
    """Return the advantage of every token, by completion."""
    return [
        [sample.advantage + added for added in sample.token_advantages or (0.0,) * len(sample.completion_ids)]
        for group in groups for sample in group.samples
    ]  # fmt: skip


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    torch.testing.assert_close(
        torch.tensor([x for row in found for x in row]), torch.tensor([x for row in expected for x in row])
    )


def test_estimators_have_verl_s_values():
    """verl.trainer.ppo.core_algos.kl_penalty_forward, within its clamps."""
    logprob, reference = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-1.5, -1.2])
    kl = reference - logprob
    expected = {"k1": logprob - reference, "k2": 0.5 * (logprob - reference) ** 2, "k3": kl.exp() - kl - 1}
    for name, values in expected.items():
        torch.testing.assert_close(ESTIMATORS[name](logprob - reference), values)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_grpo_with_kl_in_the_reward_is_verl_s(estimator: str):
    """apply_kl_penalty: token_level_rewards = scores - beta·kld; the GRPO estimator takes their sums."""
    expected = []
    for rewards, of_group in zip(REWARDS, RATIOS, strict=True):
        kld = [ESTIMATORS[estimator](torch.tensor(values, dtype=torch.float64)) for values in of_group]
        scores = torch.stack([reward - (BETA * values).sum() for reward, values in zip(rewards, kld, strict=True)])
        normed = (scores - scores.mean()) / (scores.std() + 1e-4)
        expected += [[float(a)] * len(values) for a, values in zip(normed, of_group, strict=True)]
    close(by_token(assigned(groups_of(), kl_placement="reward", kl_estimator=estimator)), expected)


def test_rloo_with_kl_in_the_reward_is_trl_s():
    """RLOOTrainer: rewards - beta·Σ(old - ref), less the mean of the others in the group."""
    expected = []
    for rewards, of_group in zip(REWARDS, RATIOS, strict=True):
        scores = [reward - BETA * sum(values) for reward, values in zip(rewards, of_group, strict=True)]
        others = [(sum(scores) - score) / (len(scores) - 1) for score in scores]
        expected += [[s - o] * len(values) for s, o, values in zip(scores, others, of_group, strict=True)]
    found = assigned(groups_of(), kl_placement="reward", baseline="leave_one_out", scale_rewards="none")
    close(by_token(found), expected)


@pytest.mark.parametrize("whitens", [True, False], ids=["reinforce_baseline", "dr_grpo"])
def test_kl_of_the_tokens_to_come_is_openrlhf_s(whitens: bool):
    """compute_reward and get_cumulative_returns at gamma 1: returns from the last token back, then whitening."""
    returns: list[list[float]] = []
    for rewards, of_group in zip(REWARDS, RATIOS, strict=True):
        for reward, values in zip(rewards, of_group, strict=True):
            per_token = [-BETA * value for value in values]
            per_token[-1] += reward - sum(rewards) / len(rewards)
            total, of_one = 0.0, []
            for value in reversed(per_token):
                total += value
                of_one.insert(0, total)
            returns.append(of_one)
    if whitens:
        every = torch.tensor([x for row in returns for x in row], dtype=torch.float64)
        scale = (every.var() + 1e-8).rsqrt()  # verl's masked_whiten, unbiased; OpenRLHF's is biased
        returns = [[float((x - every.mean()) * scale) for x in row] for row in returns]
    found = assigned(groups_of(), kl_placement="reward_to_go", scale_rewards="tokens" if whitens else "none")
    close(by_token(found), returns)


def test_tokens_that_do_not_count_and_given_advantages_stay_as_they_are():
    groups = groups_of()
    first = replace(
        groups[0].samples[0], completion_ids=(5, 6, 7, 8), logprobs=(-1.0,) * 4, mask=(1, 0, 1, 1),
        token_advantages=(0.0, 9.0, 0.0, 1.0),
    )  # fmt: skip
    groups[0] = replace(groups[0], samples=(first, *groups[0].samples[1:]))
    sample = assigned(groups, kl_placement="reward_to_go", scale_rewards="none")[0].samples[0]
    assert sample.advantage == pytest.approx(1.0 - 0.5)
    assert sample.token_advantages == pytest.approx((-BETA * 0.6, 9.0, -BETA * 0.3, 1.0 - BETA * 0.5))


@pytest.mark.parametrize("placement", ["reward", "reward_to_go"])
def test_what_nothing_judged_has_no_advantage_from_its_kl_either(placement: str):
    groups = groups_of(((1.0, None, 0.5), (0.25, 1.0)))
    sample = assigned(groups, kl_placement=placement, scale_rewards="none")[0].samples[1]
    assert (sample.advantage, sample.token_advantages) == (0.0, None)


def test_the_weight_follows_ziegler_s_rule():
    """verl's AdaptiveKLController: value *= 1 + clip(current/target - 1, -0.2, 0.2)·n_steps/horizon."""
    weight = KlWeight(0.2, target=0.1, horizon=1000)
    for kl, factor in ((0.11, 1 + 0.1 * 64 / 1000), (5.0, 1 + 0.2 * 64 / 1000), (0.0, 1 - 0.2 * 64 / 1000)):
        before = weight.value
        weight.observe(kl, completions=64)
        assert weight.value == pytest.approx(before * factor)
    assert weight.take_metrics()["kl_weight"] == Mean(before)
    assert weight.take_metrics() == {}


@pytest.mark.parametrize(
    ("placement", "observed"),
    [
        ("reward", (0.2 + 0.1 + 0.1 + 0.2 + 0.1375) / 5),  # verl: the mean over completions of their tokens' mean
        ("reward_to_go", (0.6 + 0.1 + 0.2 + 0.4 + 0.55) / 12),  # OpenRLHF: the mean over tokens
    ],
)
def test_the_target_is_compared_with_its_source_s_mean(placement: str, observed: float):
    beta = KlWeight(BETA, target=observed * 1.1, horizon=100)
    assigned(groups_of(), beta, kl_placement=placement)
    assert beta.value == pytest.approx(BETA * (1 + (1 / 1.1 - 1) * 5 / 100))
    metrics = reduce_metrics(beta.take_metrics())
    assert metrics == pytest.approx({"kl_weight": BETA, "kl_reference": 1.85 / 12, "kl_reward": -BETA * 1.85 / 5})


def moved_policy(**options: Any):
    """Return a policy that is not its reference any more, with what it started from."""
    policy = make_policy(options=AlgorithmConfig(**{"beta": BETA, **options}))
    start = make_policy(options=AlgorithmConfig()).transformer
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return policy, start


def test_divergences_are_of_the_sampler_where_it_is_known_else_of_the_policy():
    policy, start = moved_policy()
    groups = drifted_groups(policy.transformer)
    found = policy.divergences(groups)
    for group, of_group in zip(groups, found, strict=True):
        for sample, values in zip(group.samples, of_group, strict=True):
            counted = torch.tensor(sample.loss_mask(), dtype=torch.bool)
            sampled = torch.tensor(sample.logprobs, dtype=torch.float64)
            old = torch.where(sampled.isnan(), plain_logprobs(policy.transformer, sample).double(), sampled)
            expected = (old - plain_logprobs(start, sample).double())[counted]
            torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=1e-5)


def test_in_the_reward_the_term_leaves_the_loss_and_zero_advantages_can_be_left_out():
    policy, _ = moved_policy(kl_placement="reward")
    groups = drifted_groups(policy.transformer)
    assert policy.ignores_zero_advantage
    assert "kl_reference" not in policy.accumulate(pack(groups, max_tokens=1 << 20))


def test_in_the_loss_the_weight_adapts_by_step_and_goes_on_exactly_after_a_restart(tmp_path: Path):
    """OpenRLHF: the token mean of the KL in the loss, and the completions of the step."""
    adaptive = {"kl_target": 1e-3, "kl_horizon": 100}
    policy, _ = moved_policy(**adaptive)
    groups = drifted_groups(policy.transformer)
    batch = pack(groups, max_tokens=40)
    fixed, _ = moved_policy()
    assert policy.accumulate(batch)["loss"] == fixed.accumulate(batch)["loss"]
    assert reduce_metrics(policy.step())["kl_weight"] == BETA
    after = BETA * (1 + 0.2 * 12 / 100)
    assert policy.kl_weight.value == pytest.approx(after)
    checkpoints(tmp_path, policy).maybe_save(2)
    expected = reduce_metrics(policy.accumulate(batch) | policy.step())

    resumed, _ = moved_policy(**adaptive)
    assert checkpoints(tmp_path, resumed).restore() == 2
    assert resumed.kl_weight.value == pytest.approx(after)
    assert reduce_metrics(resumed.accumulate(batch) | resumed.step()) == expected
    assert expected["kl_weight"] == pytest.approx(after)
