"""Loss of supervised fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor

from lachesis.train.losses.loss import PolicyLoss


def sft_loss(logprobs: Tensor, *, num_tokens: float) -> PolicyLoss:
    """Return -Σ log π / N: a micro-batch's part of the mean over the N tokens of the whole optimizer step.

    Its gradient is that of a policy gradient on the same tokens with an advantage of 1. ``logprobs``: float [T].
    """
    total = -logprobs.sum()
    count = torch.full_like(total, logprobs.numel())
    return PolicyLoss(total / max(num_tokens, 1), {"sft_loss": torch.stack([total.detach(), count])})
