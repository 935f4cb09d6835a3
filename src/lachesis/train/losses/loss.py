"""Policy-gradient losses over packed tokens.

T completion tokens of S rows stand in one stream, A is the advantage, r = π/π_old the importance ratio. In ::

    loss = Σ_t w_t · (keep_t · c_t · ℓ(r_t, A_t) + β · KL_t + D_t) - entropy_coef · H

ℓ and the weights w (0 where the mask is) are the loss type's, ``keep`` is off-policy sequence masking times
the high-entropy mask, c corrects for the sampler. The masks touch neither the KL term nor D, which a teacher adds
(:mod:`lachesis.train.losses.teacher`). The weights are made of
counts over the whole optimizer step, so the losses of micro-batches add up to that of the whole, however it
is cut. Names and formulas are those of TRL 1.16. The options are the ``algorithm`` section of
the configuration: a new one is a field there and its use here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lachesis.common.errors import ConfigError
from lachesis.config.schema import AlgorithmConfig
from lachesis.train.losses.covariance import USES_COVARIANCE, CovarianceCut, choose, covariance_cut
from lachesis.train.losses.kl import ESTIMATORS
from lachesis.train.losses.ratios import Rows, Terms, gather_terms, sequence_ratio


class PolicyLoss(NamedTuple):
    """Loss of a micro-batch, as its part of the step's loss, with its metrics.

    Attributes:
        loss: scalar, to call backward on.
        metrics: detached pairs [2] of (weighted sum, weight) by name. The quotient is the mean; pairs of
            micro-batches add up. Means are over tokens, unless said otherwise:

            - ``mean_ratio``; ``mean_kl``, the k3 estimate of KL(π_old ‖ π);
            - ``clipped_fraction``, ``clip_fraction_low``, ``clip_fraction_high`` where the loss clips (cispo
              has no low); over sequences where the ratio is one per sequence;
            - ``entropy`` if entropies are given; ``kl_reference`` if beta > 0, as it is in the loss;
            - ``sampling_ratio``, the bounded correction, if the sampler is corrected for.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


# --- the loss of a token, ℓ(r, A): [T] ----------------------------------------------------------------------


def clipped(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -min(r·A, clip(r, 1-ε, 1+ε_high)·A), for either sign of A (PPO, arXiv 1707.06347).

    ``delta`` caps the first r, which bounds the loss where A < 0 (INTELLECT-2, arXiv 2505.07291).
    """
    inside = terms.ratio.clamp(1 - options.epsilon, 1 + options.upper_epsilon)
    return -torch.minimum(_capped(terms.ratio, options) * terms.advantages, inside * terms.advantages)


def cispo(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -sg(min(r, ε_high))·A·log π: no token loses its gradient (MiniMax-M1, arXiv 2506.13585)."""
    return -terms.ratio.detach().clamp(max=options.upper_epsilon) * terms.advantages * terms.logprobs


def sapo(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -A·σ(τ(r-1))·4/τ, τ by the sign of A: a soft gate instead of a clip (SAPO, arXiv 2511.20347)."""
    high = terms.ratio.new_full((), options.sapo_temperature_pos)
    tau = torch.where(terms.advantages > 0, high, options.sapo_temperature_neg)
    return -terms.advantages * torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau


def gmpo(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -R·A, R the geometric mean of a row's clipped ratios (GMPO, arXiv 2507.20673).

    The bounds are of log r: min(log r, clip(log r, -ε, ε_high)) where A > 0, else the maximum.
    """
    inside = terms.log_ratio.clamp(-options.epsilon, options.upper_epsilon)
    low, high = torch.minimum(terms.log_ratio, inside), torch.maximum(terms.log_ratio, inside)
    return -sequence_ratio(terms.rows, torch.where(terms.advantages > 0, low, high)) * terms.advantages


def reinforce(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -A·log π, without a ratio (GPG, arXiv 2504.02546)."""
    return -terms.advantages * terms.logprobs


def dppo_tv(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -keep·sg(min(r, δ))·A·log π, keep as :func:`within_tv` (DPPO, arXiv 2602.04879)."""
    return _kept_gradient(terms, options, keep=within_tv(terms, options))


def dppo_kl(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -keep·sg(min(r, δ))·A·log π, keep as :func:`within_kl` (DPPO, arXiv 2602.04879)."""
    return _kept_gradient(terms, options, keep=within_kl(terms, options))


@torch.no_grad()
def within_tv(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return where A pushes a token no further than a total variation of ε from π_old: bool [T].

    Of the token against all others the total variation is |π - π_old|; the bound is ε_high where A > 0.
    """
    moved = terms.logprobs.exp() - terms.old.exp()
    return torch.where(terms.advantages > 0, moved <= options.upper_epsilon, moved >= -options.epsilon)


@torch.no_grad()
def within_kl(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return where A pushes a token no further than KL(π_old ‖ π) = ε, or the token moves back: bool [T].

    The divergence is that of the token against all others; the bound is ε_high where A > 0.
    """
    new, old = terms.logprobs.exp(), terms.old.exp()
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()  # 1e-8 as in the authors' code
    divergence = (1 - old) * others - old * terms.log_ratio
    up = (divergence <= options.upper_epsilon) | (new <= old)
    down = (divergence <= options.epsilon) | (new >= old)
    return torch.where(terms.advantages > 0, up, down)


def _kept_gradient(terms: Terms, options: AlgorithmConfig, *, keep: Tensor) -> Tensor:
    weight = _capped(terms.log_ratio.detach().exp(), options) * keep
    return -weight * terms.advantages * terms.logprobs


def clip_cov(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return PPO's loss, 0 for some tokens of high covariance (Clip-Cov, arXiv 2505.22617).

    Those are drawn as :func:`lachesis.train.losses.covariance.choose` says.
    """
    return clipped(terms, options) * ~given(terms.chosen)


def kl_cov(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return -r·A, plus coef·|log r| for the tokens of highest covariance (KL-Cov, arXiv 2505.22617)."""
    penalty = options.cov_kl_coef * given(terms.chosen) * terms.log_ratio.abs()
    return -terms.log_ratio.exp() * terms.advantages + penalty


# --- normalization: what a token weighs, [T] ----------------------------------------------------------------


def sequence_mean(rows: Rows, num_sequences: float, num_tokens: float, max_length: int | None) -> Tensor:
    """Return the weights of 1/S · Σ_rows Σm(·)/Σm (GRPO, arXiv 2402.03300)."""
    return rows.share / max(num_sequences, 1)


def sequence_sum(rows: Rows, num_sequences: float, num_tokens: float, max_length: int | None) -> Tensor:
    """Return the weights of 1/S · Σm(·) (LUSPO, arXiv 2602.05261)."""
    return rows.mask / max(num_sequences, 1)


def token_mean(rows: Rows, num_sequences: float, num_tokens: float, max_length: int | None) -> Tensor:
    """Return the weights of Σm(·)/N (DAPO, arXiv 2503.14476)."""
    return rows.mask / max(num_tokens, 1)


def constant_length(rows: Rows, num_sequences: float, num_tokens: float, max_length: int | None) -> Tensor:
    """Return the weights of 1/S · Σm(·)/max_completion_length (Dr. GRPO, arXiv 2503.20783)."""
    if max_length is None:
        raise ConfigError(
            "loss_type='dr_grpo' divides by max_completion_length, which is not set",
            remedy="set it to the maximum number of tokens of a completion",
        )
    return rows.mask / (max(num_sequences, 1) * max_length)


Normalization = Callable[[Rows, float, float, int | None], Tensor]
"""The weight of each token, [T], from the step's sequences and tokens and the most tokens of a completion."""

NORMALIZATIONS: Mapping[str, Normalization] = {
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "token_mean": token_mean,
    "constant_length": constant_length,
}

TokenLoss = Callable[[Terms, AlgorithmConfig], Tensor]
"""The loss of each token, [T], with gradient."""


class LossType(NamedTuple):
    """Loss of a token, and the weight of a token."""

    per_token: TokenLoss
    weight: Normalization


LOSS_TYPES: Mapping[str, LossType] = {
    "grpo": LossType(clipped, sequence_mean),
    "bnpo": LossType(clipped, token_mean),  # TRL's mean is over a micro-batch; over a whole step it is dapo's
    "dr_grpo": LossType(clipped, constant_length),
    "dapo": LossType(clipped, token_mean),
    "cispo": LossType(cispo, token_mean),
    "sapo": LossType(sapo, sequence_mean),
    "gmpo": LossType(gmpo, sequence_mean),
    "reinforce": LossType(reinforce, token_mean),
    "dppo_tv": LossType(dppo_tv, token_mean),
    "dppo_kl": LossType(dppo_kl, token_mean),
    "clip_cov": LossType(clip_cov, token_mean),
    "kl_cov": LossType(kl_cov, token_mean),
}


# --- masks and the KL term: [T] -----------------------------------------------------------------------------


@torch.no_grad()
def off_policy_keep(terms: Terms, threshold: float) -> Tensor:
    """Return 1 where A ≥ 0 or mean_t(log π_b - log π) ≤ threshold, else 0 (OPSM, DeepSeek-V3.2, eq. 9).

    π_b is the sampler where its logprobs are given, else π_old; an unknown token (NaN) does not count as drift.
    """
    behaviour = terms.old if terms.sampled is None else terms.sampled
    drift = terms.rows.mean((behaviour - terms.logprobs).nan_to_num(nan=0.0))
    near = terms.rows.spread(drift <= threshold)
    return ((terms.advantages >= 0) | near).to(terms.logprobs.dtype)


@torch.no_grad()
def high_entropy_threshold(entropies: Tensor, *, mask: Tensor, top_quantile: float) -> Tensor:
    """Return the entropy that the highest ``top_quantile`` of the counted tokens reach (arXiv 2506.01939).

    Give it float [T] and mask [T] of the whole optimizer step. A scalar, interpolated linearly as by
    ``torch.quantile`` (which takes 16 million values and no more); +inf where no token counts.
    """
    counted = entropies[mask != 0].sort().values
    if not counted.numel():
        return entropies.new_tensor(math.inf)
    place = (1 - top_quantile) * (counted.numel() - 1)
    below = math.floor(place)
    return counted[below].lerp(counted[min(below + 1, counted.numel() - 1)], place - below)


@torch.no_grad()
def high_entropy_keep(terms: Terms, options: AlgorithmConfig, threshold: Tensor | float | None) -> Tensor:
    """Return m where the entropy reaches the threshold (by default of these tokens), else 0."""
    entropies = given(terms.entropies)
    if threshold is None:
        top = options.top_entropy_quantile
        threshold = high_entropy_threshold(entropies, mask=terms.rows.mask, top_quantile=top)
    return terms.rows.mask * (entropies >= threshold)


def kl_to_reference(terms: Terms, options: AlgorithmConfig) -> Tensor:
    """Return the estimate k3 = exp(d) - d - 1 with d = log π_ref - log π, or the one of ``kl_estimator``.

    The tokens come from π_old; times r (``use_bias_correction_kl``) it estimates the divergence under π.
    """
    kl = ESTIMATORS[options.kl_estimator or "k3"](terms.logprobs - given(terms.reference))
    return kl * terms.ratio if options.use_bias_correction_kl else kl


# --- the whole ----------------------------------------------------------------------------------------------


def policy_loss(
    logprobs: Tensor,
    *,
    row: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
    teacher_loss: Tensor | None = None,
    num_sequences: float,
    num_tokens: float,
    options: AlgorithmConfig,
    max_completion_length: int | None = None,
    entropy_threshold: Tensor | float | None = None,
    num_high_entropy_tokens: float | None = None,
    covariance: CovarianceCut | None = None,
    token_loss: TokenLoss | None = None,
) -> PolicyLoss:
    """Return the loss of a micro-batch, as its part of the loss of the whole optimizer step.

    Args:
        logprobs: float [T] under the current policy, with gradient.
        row, mask: int64 [T], 0..S-1, in any order, and float [T], 1 where the token counts, else 0.
        advantages: float [S], or [T] for one a token. Where S = T they are read as [S] if ``row`` has S-1.
        old_logprobs: float [T]; ``None``, or NaN for a token, stands for the current ones (r = 1).
        sampling_logprobs: float [T], NaN where unknown; ``None``: the sampler is not corrected for.
        ref_logprobs, entropies: float [T], where the options need them; entropies are measured if given.
        teacher_loss: float [T] with gradient, added to each token's loss as the KL term is.
        num_sequences, num_tokens: counts over the whole optimizer step and all ranks.
        max_completion_length: the constant that ``dr_grpo`` divides by.
        entropy_threshold, num_high_entropy_tokens: :func:`high_entropy_threshold` of the whole step, and how
            many of its tokens reach it; by default those of this micro-batch, which then is the whole.
        covariance: statistics by which ``clip_cov`` and ``kl_cov`` choose tokens, likewise.
        token_loss: replaces the loss type's ℓ; masks, correction, KL and normalization stay.

    Raises:
        ConfigError: the options need an input that is missing.
        TrainingError: a tensor is not [T].
    """
    _require_inputs(options, reference=ref_logprobs, entropies=entropies)
    terms = gather_terms(
        logprobs,
        row=row,
        mask=mask,
        advantages=advantages,
        old_logprobs=old_logprobs,
        sampling_logprobs=sampling_logprobs,
        ref_logprobs=ref_logprobs,
        entropies=entropies,
        options=options,
    )
    per_token, weight = _formulas(options, token_loss)
    terms = terms if token_loss else _with_choice(terms, options, covariance)
    kept, num_kept = _kept_tokens(terms, options, entropy_threshold, num_high_entropy_tokens, num_tokens)
    kl = kl_to_reference(terms, options) if options.loss_beta else None
    loss = _token_losses(terms, options, per_token=per_token, kept=kept, kl=kl, teacher=teacher_loss)
    loss = loss * weight(terms.rows, num_sequences, num_tokens, max_completion_length)
    total = loss.sum() - _entropy_bonus(terms, options, kept=kept, num_kept=num_kept)
    return PolicyLoss(total, _metrics(terms, options, per_token=per_token, kl=kl))


def sft_loss(logprobs: Tensor, *, num_tokens: float) -> PolicyLoss:
    """Return -Σ log π / N: a micro-batch's part of the mean over the N tokens of the whole optimizer step.

    Its gradient is that of a policy gradient on the same tokens with an advantage of 1. ``logprobs``: float [T].
    """
    total = -logprobs.sum()
    count = torch.full_like(total, logprobs.numel())
    return PolicyLoss(total / max(num_tokens, 1), {"sft_loss": torch.stack([total.detach(), count])})


def _formulas(options: AlgorithmConfig, token_loss: TokenLoss | None) -> LossType:
    """Return the formulas of the loss type, or those that the options replace them with."""
    named = LOSS_TYPES[options.loss_type]
    weight = named.weight if options.normalization is None else NORMALIZATIONS[options.normalization]
    return LossType(token_loss or named.per_token, weight)


def _with_choice(terms: Terms, options: AlgorithmConfig, covariance: CovarianceCut | None) -> Terms:
    """Return the terms with the tokens that the loss type chooses by covariance, if it does so."""
    if options.loss_type not in USES_COVARIANCE:
        return terms
    return terms._replace(chosen=choose(terms, covariance or covariance_cut(terms, options), options))


def _kept_tokens(
    terms: Terms, options: AlgorithmConfig, threshold: Tensor | float | None, count: float | None, num_tokens: float
) -> tuple[Tensor, float]:
    """Return which tokens are kept by their entropy, [T], and their number in the whole step."""
    if options.top_entropy_quantile == 1:
        return terms.rows.mask, num_tokens
    kept = high_entropy_keep(terms, options, threshold)
    return kept, float(kept.sum()) if count is None else count


def _token_losses(
    terms: Terms,
    options: AlgorithmConfig,
    *,
    per_token: TokenLoss,
    kept: Tensor,
    kl: Tensor | None,
    teacher: Tensor | None,
) -> Tensor:
    """Return the losses [T]: corrected for the sampler, of the kept tokens, with the KL term and the teacher's."""
    loss = per_token(terms, options)
    if options.off_policy_mask_threshold is not None:
        loss = loss * off_policy_keep(terms, options.off_policy_mask_threshold)
    if terms.correction is not None:
        loss = loss * terms.correction
    if options.top_entropy_quantile < 1:
        loss = loss * kept
    loss = loss if kl is None else loss + options.loss_beta * kl
    return loss if teacher is None else loss + teacher


def _entropy_bonus(terms: Terms, options: AlgorithmConfig, *, kept: Tensor, num_kept: float) -> Tensor | float:
    if not options.entropy_coef:
        return 0.0
    return options.entropy_coef * (given(terms.entropies) * kept).sum() / max(num_kept, 1)


@torch.no_grad()
def _metrics(terms: Terms, options: AlgorithmConfig, *, per_token: TokenLoss, kl: Tensor | None) -> dict[str, Tensor]:
    rows = terms.rows
    tokens = {"mean_ratio": terms.ratio, "mean_kl": ESTIMATORS["k3"](-terms.log_ratio)}
    optional = {"entropy": terms.entropies, "kl_reference": kl, "sampling_ratio": terms.correction}
    tokens |= {name: values for name, values in optional.items() if values is not None}
    sequences: dict[str, Tensor] = {}
    level = tokens if options.importance_sampling_level == "token" else sequences
    level |= _clip_indicators(terms, options, per_token=per_token)

    metrics = _pairs(tokens, weight=rows.mask, total=rows.mask.sum())
    if sequences:
        metrics |= _pairs(sequences, weight=rows.share, total=(rows.tokens > 0).sum())
    return metrics


def _clip_indicators(terms: Terms, options: AlgorithmConfig, *, per_token: TokenLoss) -> dict[str, Tensor]:
    """Return where r is beyond the bound in the direction of A: bool [T]."""
    if per_token is clipped:
        ratio = _capped(terms.ratio, options)
        low = (ratio < 1 - options.epsilon) & (terms.advantages < 0)
        high = (ratio > 1 + options.upper_epsilon) & (terms.advantages > 0)
        return {"clipped_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}
    if per_token is cispo:
        high = (terms.ratio > options.upper_epsilon) & (terms.advantages > 0)
        return {"clipped_fraction": high, "clip_fraction_high": high}
    if per_token is gmpo:
        low = (terms.log_ratio < -options.epsilon) & (terms.advantages < 0)
        high = (terms.log_ratio > options.upper_epsilon) & (terms.advantages > 0)
        return {"clipped_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}
    if per_token in (dppo_tv, dppo_kl):
        keep = within_tv if per_token is dppo_tv else within_kl
        return {"clipped_fraction": ~keep(terms, options)}
    return {} if terms.chosen is None else {"clipped_fraction": terms.chosen}


def _pairs(values: Mapping[str, Tensor], *, weight: Tensor, total: Tensor) -> dict[str, Tensor]:
    """Return (Σ weight · value, total) of each, [T] -> [2]; all in one product."""
    sums = torch.stack([value.to(weight.dtype) for value in values.values()]) @ weight
    pairs = torch.stack((sums, total.to(weight.dtype).expand_as(sums)), dim=1)
    return dict(zip(values, pairs.unbind(), strict=True))


def _capped(ratio: Tensor, options: AlgorithmConfig) -> Tensor:
    return ratio if options.delta is None else ratio.clamp(max=options.delta)


def given(values: Tensor | None) -> Tensor:
    """Return a required value, whose presence :func:`policy_loss` has checked."""
    assert values is not None
    return values


def _require_inputs(options: AlgorithmConfig, *, reference: Tensor | None, entropies: Tensor | None) -> None:
    if options.loss_beta and reference is None:
        raise ConfigError(f"beta={options.beta:g} needs ref_logprobs", remedy="pass them, or set beta to 0")
    if entropies is None and (options.entropy_coef or options.top_entropy_quantile < 1):
        raise ConfigError(
            f"entropy_coef={options.entropy_coef:g} and "
            f"top_entropy_quantile={options.top_entropy_quantile:g} need entropies",
            remedy="pass them, or leave these options at 0 and 1",
        )
