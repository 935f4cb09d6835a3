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

# Stands for the logprob of an impossible token: its probability is 0, and a product with it is not NaN.
IMPOSSIBLE = -1e4


def forward_kl(student_TV: Tensor, teacher_TV: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) = Σ_v p·(log p - log q), p the teacher's and q the student's: [T]."""
    return (teacher_TV.exp() * (teacher_TV - student_TV)).sum(-1)


def reverse_kl(student_TV: Tensor, teacher_TV: Tensor) -> Tensor:
    """Return KL(student ‖ teacher) = Σ_v q·(log q - log p): [T]."""
    return forward_kl(teacher_TV, student_TV)


def generalized_jsd(student_TV: Tensor, teacher_TV: Tensor, *, beta: float) -> Tensor:
    """Return β·KL(p ‖ m) + (1 - β)·KL(q ‖ m) with the mixture m = β·p + (1 - β)·q, 0 < β < 1: [T]."""
    mixture_TV = torch.logaddexp(teacher_TV + math.log(beta), student_TV + math.log1p(-beta))
    return beta * forward_kl(mixture_TV, teacher_TV) + (1 - beta) * forward_kl(mixture_TV, student_TV)


def divergence(student_TV: Tensor, teacher_TV: Tensor, *, beta: float) -> Tensor:
    """Return the divergence that ``beta`` selects, 0 ≤ β ≤ 1: [T]."""
    if beta == 0:
        return forward_kl(student_TV, teacher_TV)
    if beta == 1:
        return reverse_kl(student_TV, teacher_TV)
    return generalized_jsd(student_TV, teacher_TV, beta=beta)


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
