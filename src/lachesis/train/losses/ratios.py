"""Importance ratios over packed tokens, from which the losses are computed.

T completion tokens of S rows stand in one stream; ``row`` [T] names each token's row and ``mask`` [T] is 1
where the token counts. Nothing is padded, rows need not be contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lachesis.common.errors import TrainingError
from lachesis.config.schema import AlgorithmConfig


@dataclass(frozen=True)
class Rows:
    """Grouping of tokens into rows: ``row`` int64 [T], ``mask`` float [T], ``size`` = S."""

    row: Tensor
    mask: Tensor
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Return masked sums per row, [T] -> [S]."""
        return values.new_zeros(self.size).index_add(0, self.row, values * self.mask)

    def mean(self, values: Tensor) -> Tensor:
        """Return masked means per row, [T] -> [S]; 0 for a row without tokens."""
        return self.sum(values) / self.divisor

    def spread(self, values: Tensor) -> Tensor:
        """Return each row's value at its tokens, [S] -> [T]."""
        return values.index_select(0, self.row)

    @cached_property
    def tokens(self) -> Tensor:
        """Return Σm per row, [S]."""
        return self.mask.new_zeros(self.size).index_add(0, self.row, self.mask)

    @cached_property
    def divisor(self) -> Tensor:
        """Return Σm per row, at least 1, [S]."""
        return self.tokens.clamp(min=1.0)

    @cached_property
    def share(self) -> Tensor:
        """Return m/Σm: each token's share of its row, [T]."""
        return self.mask / self.spread(self.divisor)


class Terms(NamedTuple):
    """Inputs of a loss.

    All tensors are [T], of one dtype, and 0 (ratios: 1) where the mask is 0.

    Attributes:
        old: log π_old, with the current logprobs (detached) where it was unknown.
        sampled: log π of the sampler, NaN where unknown.
        log_ratio: log π - log π_old of each token.
        ratio: the importance ratio of the configured level.
        correction: π_old/π_sampler, bounded; ``None`` where there is none.
        chosen: bool, the tokens that a loss type treats differently by their covariance.
    """

    rows: Rows
    logprobs: Tensor
    advantages: Tensor
    old: Tensor
    sampled: Tensor | None
    reference: Tensor | None
    entropies: Tensor | None
    log_ratio: Tensor
    ratio: Tensor
    correction: Tensor | None
    chosen: Tensor | None = None


def token_ratio(rows: Rows, log_ratio: Tensor) -> Tensor:
    """Return r_t = exp(log π_t - log π_old,t): [T]."""
    return log_ratio.exp()


def sequence_ratio(rows: Rows, log_ratio: Tensor) -> Tensor:
    """Return r = exp(mean_t(log π_t - log π_old,t)), one for all tokens of a row (GSPO, arXiv 2507.18071): [T]."""
    return rows.spread(rows.mean(log_ratio).exp())


def product_ratio(rows: Rows, log_ratio: Tensor) -> Tensor:
    """Return r = Π_t π_t/π_old,t, one for all tokens of a row (RLOO, arXiv 2402.14740): [T]."""
    return rows.spread(rows.sum(log_ratio).exp())


RATIOS: Mapping[str, Callable[[Rows, Tensor], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_product": product_ratio,
}


def truncate(weight: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return the weight clamped to the bounds (truncated importance sampling)."""
    return weight.clamp(min=low, max=high)


def reject(weight: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return the weight, 0 outside the bounds (masked importance sampling)."""
    inside = (weight >= (-math.inf if low is None else low)) & (weight <= (math.inf if high is None else high))
    return weight.masked_fill(~inside, 0.0)


class SamplerMode(NamedTuple):
    """Mode of sampler correction: one weight per sequence or per token, and the function that bounds it."""

    of_sequence: bool
    bounded: Callable[[Tensor, float | None, float | None], Tensor]


SAMPLER_MODES: Mapping[str, SamplerMode] = {
    "token_truncate": SamplerMode(False, truncate),
    "token_mask": SamplerMode(False, reject),
    "sequence_truncate": SamplerMode(True, truncate),
    "sequence_mask": SamplerMode(True, reject),
}


@torch.no_grad()
def sampler_correction(rows: Rows, old: Tensor, sampled: Tensor, options: AlgorithmConfig) -> Tensor | None:
    """Return c = exp(log π_old - log π_sampler) of a token, or of the sum over its row; without gradient: [T].

    ``None`` where the options have no correction. A token that the sampler gave no logprob for (NaN) contributes 0 to
    the log, so a ratio of 1.
    """
    if options.sampler_correction == "none":
        return None
    mode = SAMPLER_MODES[options.sampler_correction]
    log_weight = (old - sampled).nan_to_num(nan=0.0)
    if mode.of_sequence:
        log_weight = rows.spread(rows.sum(log_weight))
    return mode.bounded(log_weight.exp(), options.sampler_correction_min, options.sampler_correction_max)


def gather_terms(
    logprobs: Tensor,
    *,
    row: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None,
    sampling_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    entropies: Tensor | None,
    options: AlgorithmConfig,
) -> Terms:
    """Return the inputs of the loss, blanked where the mask is 0, and their ratios.

    Blanking matters: a token that the model did not sample may have any logprob, and 0 · inf is NaN.

    Raises:
        TrainingError: a tensor is not [T].
    """
    blank = mask == 0

    def clean(name: str, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        _require_shape(name, values, logprobs)
        return values.to(logprobs.dtype).masked_fill(blank, 0.0)

    _require_shape("row", row, logprobs)
    _require_shape("mask", mask, logprobs)
    size, per_token = count_rows(row, advantages)
    rows = Rows(row, mask.to(logprobs.dtype), size)
    advantages = advantages.to(logprobs.dtype)
    current = logprobs.masked_fill(blank, 0.0)
    old = clean("old_logprobs", old_logprobs)
    old = current.detach() if old is None else torch.where(old.isnan(), current.detach(), old)
    sampled = clean("sampling_logprobs", sampling_logprobs)
    log_ratio = current - old
    return Terms(
        rows=rows,
        logprobs=current,
        advantages=advantages if per_token else rows.spread(advantages),
        old=old,
        sampled=sampled,
        reference=clean("ref_logprobs", ref_logprobs),
        entropies=clean("entropies", entropies),
        log_ratio=log_ratio,
        ratio=RATIOS[options.importance_sampling_level](rows, log_ratio),
        correction=None if sampled is None else sampler_correction(rows, old, sampled, options),
    )


def count_rows(row: Tensor, advantages: Tensor) -> tuple[int, bool]:
    """Return S, and whether advantages are per token; [S] and [T] look alike only where S = T."""
    if advantages.numel() != row.numel() or not row.numel():
        return advantages.numel(), False
    named = int(row.max()) + 1
    return named, named < row.numel()


def _require_shape(name: str, values: Tensor, logprobs: Tensor) -> None:
    if values.shape != logprobs.shape:
        raise TrainingError(
            f"the loss got {name} of shape {tuple(values.shape)} for logprobs of {tuple(logprobs.shape)}",
            remedy="give one value per packed token",
        )
