"""Divergences between a teacher's and the policy's distributions of the next token.

Pure functions, in nats.

Suffixes are shapes: T tokens, V outcomes. Each row of ``student_TV`` and ``teacher_TV`` is a distribution as
log-probabilities. Names and formulas are those of on-policy distillation (GKD, arXiv 2306.13649, eq. 1) with TRL's
reading of beta: 0 is the forward KL, 1 the reverse KL, between them the generalized Jensen-Shannon divergence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The logprob of an impossible token: its probability is 0, and a product with it is not NaN.
IMPOSSIBLE = -1e4


def divergence(student_TV: Tensor, teacher_TV: Tensor, *, beta: float, clip: float | None = None) -> Tensor:
    """Return the divergence that ``beta`` selects, 0 ≤ β ≤ 1: [T].

    With p the teacher's probabilities and q the student's: KL(p ‖ q) for 0, KL(q ‖ p) for 1, and between them β·KL(p ‖
    m) + (1 - β)·KL(q ‖ m) with the mixture m = β·p + (1 - β)·q. ``clip`` bounds each outcome's contribution from above
    (OPSD, arXiv 2601.18734).
    """
    if beta == 0:
        parts_TV = _kl_parts(teacher_TV, student_TV)
    elif beta == 1:
        parts_TV = _kl_parts(student_TV, teacher_TV)
    else:
        mixture_TV = torch.logaddexp(teacher_TV + math.log(beta), student_TV + math.log1p(-beta))
        parts_TV = beta * _kl_parts(teacher_TV, mixture_TV) + (1 - beta) * _kl_parts(student_TV, mixture_TV)
    return (parts_TV if clip is None else parts_TV.clamp(max=clip)).sum(-1)


def _kl_parts(of_TV: Tensor, from_TV: Tensor) -> Tensor:
    """Return the parts of KL(of ‖ from), one for each outcome: [T, V]."""
    return of_TV.exp() * (of_TV - from_TV)


def with_rest(logprobs_TK: Tensor) -> Tensor:
    """Append all other tokens as one more outcome: [T, K+1].

    Its log-probability is log(1 - Σ_k p_k), at least the rounding of the sum. A divergence over these outcomes is never
    above that over the whole vocabulary (the data-processing inequality), and 0 only where both agree on each of the K
    tokens.
    """
    rounding = torch.finfo(logprobs_TK.dtype).eps
    known = logprobs_TK.logsumexp(-1, keepdim=True).clamp(max=-rounding)
    return torch.cat([logprobs_TK, (-known.expm1()).log()], dim=-1)


def sampled_reverse_kl(logprobs_T: Tensor, teacher_T: Tensor) -> Tensor:
    """Return log q - log p of sampled tokens, whose mean estimates the reverse KL; 0 where p is NaN: [T].

    Its negative, as an advantage, has the reverse KL's gradient for its policy gradient.
    """
    return (logprobs_T - teacher_T).nan_to_num(nan=0.0)
