"""Choice of the tokens that lower the policy's entropy most, by covariance (arXiv 2505.22617).

The covariance of a token is (A - mean A)·(log π - mean log π), with means over all tokens of the optimizer step. The
authors take means and tokens of a micro-batch; over the whole step the choice does not depend on how it is cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lachesis.config.schema import AlgorithmConfig
from lachesis.train.losses.ratios import Terms

USES_COVARIANCE = ("clip_cov", "kl_cov")


class CovarianceCut(NamedTuple):
    """Means over a step's tokens, and the lowest score of a chosen token: scalars."""

    advantage: Tensor
    logprob: Tensor
    threshold: Tensor


@torch.no_grad()
def covariance_cut(terms: Terms, options: AlgorithmConfig) -> CovarianceCut:
    """Return the means over the counted tokens of ``terms``, and the lowest score of the share to choose.

    That is ``cov_share`` of the tokens, rounded down and at least one.
    """
    counted = terms.rows.mask != 0
    if not counted.any():
        none = terms.logprobs.new_zeros(())
        return CovarianceCut(none, none, none)
    means = terms.advantages[counted].mean(), terms.logprobs[counted].mean()
    scores = _scores(terms, CovarianceCut(*means, means[0]), options)
    count = max(1, int(options.cov_share * int(counted.sum())))
    best = scores[counted].topk(min(count + 1, int(counted.sum()))).values
    # Between the last that is chosen and the next: another pass over the tokens may round otherwise.
    threshold = best[-1] if len(best) <= count else (best[-2] + best[-1]) / 2
    return CovarianceCut(*means, threshold)


@torch.no_grad()
def choose(terms: Terms, cut: CovarianceCut, options: AlgorithmConfig) -> Tensor:
    """Return which tokens are chosen: bool [T].

    For ``kl_cov`` those of highest covariance; for ``clip_cov`` some at random of those whose covariance is between
    ``cov_low`` and ``cov_high`` and whose gradient PPO's clip does not remove.
    """
    scores = _scores(terms, cut, options)
    return (scores >= cut.threshold) & (scores > _NEVER) & (terms.rows.mask != 0)


_NEVER = -1e30


def _scores(terms: Terms, cut: CovarianceCut, options: AlgorithmConfig) -> Tensor:
    """Return each token's ranking score: the covariance, or lots for ``clip_cov``; -1e30 for no candidate: [T]."""
    covariance = (terms.advantages - cut.advantage) * (terms.logprobs - cut.logprob)
    if options.loss_type == "kl_cov":
        return covariance.masked_fill(covariance == 0, _NEVER)  # of advantages that are all equal, no token
    ratio = terms.log_ratio.exp()
    inside = ratio.clamp(1 - options.epsilon, 1 + options.upper_epsilon)
    candidate = (ratio - inside) * terms.advantages <= 0  # else the clip has taken its gradient
    candidate &= (covariance > options.cov_low) & (covariance < options.cov_high)
    # A token's lot is the fraction of its covariance in thousandths, which is practically random, and the same in
    # whatever micro-batch the token is.
    return (1024 * covariance).remainder(1.0).masked_fill(~candidate, _NEVER)
