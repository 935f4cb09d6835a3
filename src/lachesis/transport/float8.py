"""Matrices in 8 bits as an engine holds them: a scale for each output, so that rows can be cut and fused freely."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
SCALE = "_scale"
"""A matrix's name with this is that of its scales."""

_LARGEST = torch.finfo(FP8).max
# Below it vLLM's kernel lets no scale fall, so that a row of zeros can be divided by it.
_LEAST_SCALE = 1.0 / (_LARGEST * 512.0)
# Rows are rounded this many elements at a time: each takes several float32 meanwhile.
_CHUNK = 1 << 26


@torch.no_grad()
def by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [out, in] in float8_e4m3fn and the scales [out, 1] in float32 that its rows are multiplied by.

    Bit for bit what vLLM computes when it quantizes a layer by output channels: the scale of a row is its largest
    absolute value over 448, and its elements are divided by that in float32, clamped and rounded to even.
    """
    rounded = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device)
    # By a number torch would multiply with its reciprocal on a GPU, which is off in the last bit.
    largest = torch.tensor(_LARGEST, device=weight.device)
    step = max(1, _CHUNK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step].float()
        scale = (rows.abs().amax(dim=1, keepdim=True) / largest).clamp_(min=_LEAST_SCALE)
        scales[start : start + step] = scale
        rounded[start : start + step] = (rows / scale).clamp_(-_LARGEST, _LARGEST).to(FP8)
    return rounded, scales
