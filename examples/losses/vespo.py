"""A loss of one's own, for ``algorithm.loss``: VESPO (arXiv 2602.10693), as TRL 1.16 has it.

It is -sg(φ(W))·A·log π with φ(W) = e^λ·W^k·e^(-λW), W the product of a completion's ratios, k and λ by the sign of A.
With ``algorithm.loss_type: dapo`` it is the mean over all tokens of the step.
"""

from __future__ import annotations

import math

import torch

# Bounds of log-weights in the authors' code.
LOWEST, HIGHEST = math.log(1e-8), 20.0


def vespo(
    logprobs: torch.Tensor,
    *,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    row: torch.Tensor,
    num_rows: int,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> torch.Tensor:
    """The loss of each token, float [T]; masked tokens have a ratio of 1."""
    with torch.no_grad():
        ratios = (logprobs - old_logprobs).clamp(-HIGHEST, HIGHEST)
        log_weight = ratios.new_zeros(num_rows).index_add(0, row, ratios).clamp(LOWEST, HIGHEST)[row]
        positive = advantages >= 0
        k = torch.where(positive, k_pos, k_neg)
        decay = torch.where(positive, lambda_pos, lambda_neg)
        weight = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return -weight * advantages * logprobs
