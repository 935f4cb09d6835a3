"""Losses of the literature against transcriptions of their authors' formulas, row by row in plain floats."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lachesis.train.losses.covariance import CovarianceCut
from lachesis.train.losses.loss import PolicyLoss, policy_loss
from tests.losses import loss_options

DICE = random.Random(7)
LENGTHS = (5, 3, 8, 1)
NEW = [[-DICE.uniform(0.01, 3) for _ in range(n)] for n in LENGTHS]
OLD = [[new + DICE.uniform(-0.9, 0.9) * min(1, -new) for new in row] for row in NEW]
ADVANTAGES = [1.3, -0.7, 0.4, -1.1]
TOKENS = sum(LENGTHS)


class Token(NamedTuple):
    """What the formulas are about."""

    new: float
    old: float
    advantage: float

    @property
    def ratio(self) -> float:
        return math.exp(self.new - self.old)


ROWS = [[Token(n, o, a) for n, o in zip(*pair, strict=True)] for *pair, a in zip(NEW, OLD, ADVANTAGES, strict=True)]
ALL = [token for row in ROWS for token in row]


def evaluated(*, advantages: Sequence[float] = ADVANTAGES, **options: Any) -> tuple[PolicyLoss, Tensor]:
    """Return the loss over all rows, interleaved, and its gradient in the order of :data:`ALL`."""
    order = random.Random(3).sample(range(TOKENS), TOKENS)
    rows = torch.tensor([row for row, length in enumerate(LENGTHS) for _ in range(length)])
    new = torch.tensor([token.new for token in ALL], dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        new[order],
        row=rows[order],
        mask=torch.ones(TOKENS, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_logprobs=torch.tensor([token.old for token in ALL], dtype=torch.float64)[order],
        num_sequences=len(LENGTHS),
        num_tokens=TOKENS,
        options=loss_options(sampler_correction="none", **options),
        max_completion_length=16,
    )
    (gradient,) = torch.autograd.grad(output.loss, new)
    return output, gradient


def dppo_tv(token: Token) -> float:
    """Return the mask of verl's `dppo_tv` with bounds 0.1 and 0.15: 1 keeps the token."""
    moved = math.exp(token.new) - math.exp(token.old)
    return float(moved <= 0.15 if token.advantage > 0 else moved >= -0.1)


def dppo_kl(token: Token) -> float:
    """Return the mask of verl's `dppo_kl` with bounds 0.02 and 0.05."""
    p, q = math.exp(token.old), math.exp(token.new)
    kl = p * (token.old - token.new) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    if token.advantage > 0:
        return float(kl <= 0.05 or q <= p)
    return float(kl <= 0.02 or q >= p)


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"loss_type": "dppo_tv", "epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.5}, dppo_tv),
        ({"loss_type": "dppo_kl", "epsilon": 0.02, "epsilon_high": 0.05, "delta": 1.5}, dppo_kl),
    ],
)
def test_dppo_is_that_of_verl(options: dict[str, Any], keep: Callable[[Token], float]):
    kept = [keep(token) for token in ALL]
    assert 0 < sum(kept) < TOKENS
    assert any(token.ratio > 1.5 for token in ALL)
    weights = [k * min(token.ratio, 1.5) * token.advantage for k, token in zip(kept, ALL, strict=True)]
    output, gradient = evaluated(**options)
    loss = -sum(weight * token.new for weight, token in zip(weights, ALL, strict=True)) / TOKENS
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-12)
    assert gradient.tolist() == pytest.approx([-weight / TOKENS for weight in weights], rel=1e-12)
    clipped = output.metrics["clipped_fraction"]
    assert float(clipped[0] / clipped[1]) == pytest.approx(1 - sum(kept) / TOKENS)


def test_gmpo_is_that_of_verl_and_trl():
    loss, low, high = 0.0, 0.4, 0.3
    for row in ROWS:
        sign = 1 if row[0].advantage > 0 else -1
        logs = [token.new - token.old for token in row]
        bounded = [sign * min(sign * log, sign * max(-low, min(high, log))) for log in logs]
        loss -= row[0].advantage * math.exp(sum(bounded) / len(row)) / len(ROWS)
    output, gradient = evaluated(loss_type="gmpo", epsilon=low, epsilon_high=high)
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-12)
    clipped = [(t.new - t.old > high and t.advantage > 0) or (t.new - t.old < -low and t.advantage < 0) for t in ALL]
    assert [value == 0 for value in gradient.tolist()] == clipped
    assert any(clipped) and not all(clipped)


def test_reinforce_is_the_plain_policy_gradient():
    output, gradient = evaluated(loss_type="reinforce")
    assert float(output.loss.detach()) == pytest.approx(-sum(t.new * t.advantage for t in ALL) / TOKENS, rel=1e-12)
    assert gradient.tolist() == pytest.approx([-token.advantage / TOKENS for token in ALL])


def covariances() -> list[float]:
    """Return (A - mean A)·(log π - mean log π) of each token, as verl has it."""
    advantage = sum(token.advantage for token in ALL) / TOKENS
    new = sum(token.new for token in ALL) / TOKENS
    return [(token.advantage - advantage) * (token.new - new) for token in ALL]


def clip_loss(token: Token, low: float, high: float) -> float:
    inside = max(1 - low, min(1 + high, token.ratio))
    return max(-token.ratio * token.advantage, -inside * token.advantage)


def test_kl_cov_is_that_of_verl():
    chosen = sorted(range(TOKENS), key=covariances().__getitem__)[-int(0.3 * TOKENS) :]
    losses = [
        -token.ratio * token.advantage + (2.0 * abs(token.new - token.old) if place in chosen else 0.0)
        for place, token in enumerate(ALL)
    ]
    output, _ = evaluated(loss_type="kl_cov", cov_share=0.3, cov_kl_coef=2.0)
    assert float(output.loss.detach()) == pytest.approx(sum(losses) / TOKENS, rel=1e-12)


def test_clip_cov_is_that_of_verl_where_all_candidates_are_taken():
    candidates = [
        low_cov < cov < high_cov and clip_loss(token, 0.2, 0.28) == -token.ratio * token.advantage
        for cov, token in zip(covariances(), ALL, strict=True)
        for low_cov, high_cov in [(0.1, 1.5)]
    ]
    assert 1 < sum(candidates) < TOKENS / 2
    losses = [0.0 if out else clip_loss(token, 0.2, 0.28) for out, token in zip(candidates, ALL, strict=True)]
    output, gradient = evaluated(
        loss_type="clip_cov", cov_share=0.5, cov_low=0.1, cov_high=1.5, epsilon=0.2, epsilon_high=0.28
    )
    assert float(output.loss.detach()) == pytest.approx(sum(losses) / TOKENS, rel=1e-12)
    assert all(value == 0 for value, out in zip(gradient.tolist(), candidates, strict=True) if out)

    fewer, _ = evaluated(
        loss_type="clip_cov", cov_share=2.5 / TOKENS, cov_low=0.1, cov_high=1.5, epsilon=0.2, epsilon_high=0.28
    )
    assert float(fewer.metrics["clipped_fraction"][0]) == 2  # of the candidates, drawn by lot


def test_no_token_is_chosen_where_none_is_a_candidate():
    output, _ = evaluated(loss_type="clip_cov", cov_low=50.0, cov_high=60.0)
    assert float(output.metrics["clipped_fraction"][0]) == 0
    assert float(output.loss.detach()) == pytest.approx(sum(clip_loss(t, 0.2, 0.2) for t in ALL) / TOKENS)


def test_a_product_of_ratios_is_that_of_trl_s_rloo():
    loss = 0.0
    for row in ROWS:
        ratio = math.exp(sum(token.new - token.old for token in row))
        inside = max(0.8, min(1.2, ratio))
        loss += max(-ratio * row[0].advantage, -inside * row[0].advantage) / len(ROWS)
    output, _ = evaluated(importance_sampling_level="sequence_product")
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-12)


def test_decoupled_ppo_weighs_what_the_proximal_policy_is_to_the_behaviour():
    """AReaL's objective (arXiv 2505.24298, eq. 5): π_prox/π_behav · min(u·A, clip(u)·A), u = π/π_prox."""
    sampled = [[old + DICE.uniform(-2.5, 1.0) for old in row] for row in OLD]
    sampled[2][3] = OLD[2][3] - 2.0
    losses = []
    for token, behaviour in zip(ALL, [s for row in sampled for s in row], strict=True):
        weight = math.exp(token.old - behaviour)
        losses.append(clip_loss(token, 0.2, 0.2) * (weight if weight <= 5 else 0.0))
    rows = torch.tensor([row for row, length in enumerate(LENGTHS) for _ in range(length)])
    double = {"dtype": torch.float64}
    output = policy_loss(
        torch.tensor([token.new for token in ALL], **double, requires_grad=True),
        row=rows,
        mask=torch.ones(TOKENS, **double),
        advantages=torch.tensor(ADVANTAGES, **double),
        old_logprobs=torch.tensor([token.old for token in ALL], **double),
        sampling_logprobs=torch.tensor([s for row in sampled for s in row], **double),
        num_sequences=len(LENGTHS),
        num_tokens=TOKENS,
        options=loss_options(loss_type="dapo", sampler_correction="token_mask", sampler_correction_max=5.0),
    )
    assert float(output.loss.detach()) == pytest.approx(sum(losses) / TOKENS, rel=1e-12)


def test_no_token_is_chosen_where_all_advantages_are_equal():
    output, gradient = evaluated(loss_type="kl_cov", cov_share=0.3, advantages=[0.0] * len(LENGTHS))
    assert float(output.metrics["clipped_fraction"][0]) == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("normalization", "divisor"),
    [
        ("sequence_mean", lambda length: length * len(LENGTHS)),
        ("sequence_sum", lambda length: len(LENGTHS)),
        ("token_mean", lambda length: TOKENS),
        ("constant_length", lambda length: len(LENGTHS) * 16),
    ],
)
def test_a_normalization_takes_the_place_of_the_loss_type_s(normalization: str, divisor: Callable[[int], int]):
    output, _ = evaluated(loss_type="reinforce", normalization=normalization)
    expected = -sum(token.new * token.advantage / divisor(len(row)) for row in ROWS for token in row)
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-12)


def test_a_cut_of_another_step_chooses_by_that_step():
    nothing = CovarianceCut(*(torch.tensor(value, dtype=torch.float64) for value in (0.0, 0.0, 1e9)))
    rows = torch.tensor([row for row, length in enumerate(LENGTHS) for _ in range(length)])
    output = policy_loss(
        torch.tensor([token.new for token in ALL], dtype=torch.float64, requires_grad=True),
        row=rows,
        mask=torch.ones(TOKENS, dtype=torch.float64),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        num_sequences=len(LENGTHS),
        num_tokens=TOKENS,
        covariance=nothing,
        options=loss_options(loss_type="kl_cov", cov_share=1.0),
    )
    assert float(output.metrics["clipped_fraction"][0]) == 0
