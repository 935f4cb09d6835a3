"""Float8 matrices as an engine holds them: one scale per output, so that rows can be cut and fused freely."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
SCALE = "_scale"
"""Suffix of a matrix's name that gives the name of its scales."""

_LARGEST = torch.finfo(FP8).max
# Lower bound of scales in vLLM's kernel, so that a row of zeros can be divided by its scale.
_LEAST_SCALE = 1.0 / (_LARGEST * 512.0)


@torch.no_grad()
def by_rows(weight: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return a matrix [out, in] in float8_e4m3fn and its float32 row scales [out, 1].

    The result equals, bit for bit, what vLLM computes when it quantizes a layer by output channels: the scale of a row
    is its largest absolute value over 448, and its elements are divided by that in float32 and rounded to even. None of
    them can exceed 448, to which vLLM clamps them.

    Args:
        out: tensors to write to and return; new ones if unset.
    """
    rounded, scales = out or (
        torch.empty(weight.shape, dtype=FP8, device=weight.device),
        torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device),
    )
    # The cost is the number of passes over memory: one for the largest values, and one to divide. The divisor is a
    # tensor, because on a GPU torch multiplies by the reciprocal of a number, which is off in the last bit.
    least, most = torch.aminmax(weight, dim=1, keepdim=True)
    largest = torch.maximum(most, -least).float()
    torch.div(largest, torch.tensor(_LARGEST, device=weight.device), out=scales).clamp_(min=_LEAST_SCALE)
    torch.div(weight, scales, out=rounded)
    return rounded, scales
