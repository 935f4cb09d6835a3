"""Triton kernels for two operations on every weight of an update, each in one pass over memory.

An H200 rounds the matrices of 8 billion parameters in 10 ms instead of 49 with torch's operations, and merges an
adapter into them in 25 instead of 65 ms (benchmarks/RESULTS.md, "8B with LoRA, beside TRL").
"""
# pyright: basic, reportOperatorIssue=false
# Triton's language has no types.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of a row at a time: up to this many values are held by one program, and rows that are longer are gone through twice.
_MOST_HELD = 16384
_TILE = 64
MOST_RANK = 128
"""Of an adapter that :func:`merge` takes: its A and B are held beside a tile."""


@cache
def usable(device: torch.device) -> bool:
    """Return True if the kernels run on the device.

    They need an NVIDIA GPU of the Ada, Hopper or a later generation, on which Triton can round to 8 bits.
    """
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def round_rows(weight: Tensor, *, rounded: Tensor, scales: Tensor, least_scale: float) -> None:
    """Round ``weight`` [out, in] into ``rounded`` and ``scales``.

    Equals :func:`lachesis.transport.float8.by_rows` bit for bit.
    """
    rows, columns = weight.shape
    kernel: Any = _round_row
    held = min(_MOST_HELD, triton.next_power_of_2(columns))
    with torch.cuda.device(weight.device):  # Triton starts a kernel on the current one
        kernel[(rows,)](
            weight,
            rounded,
            scales,
            columns,
            weight.stride(0),
            rounded.stride(0),
            scales.stride(0),
            least_scale,
            HELD=held,
            num_warps=max(1, min(16, held // 512)),
        )


def merge(weight: Tensor, b: Tensor, a: Tensor, *, scaling: float) -> Tensor:
    """Return ``weight`` [out, in] plus ``scaling * B @ A`` in float32, rounded once to the weight's dtype; contiguous.

    ``b`` is [out, rank], ``a`` [rank, in].
    """
    rows, columns = weight.shape
    rank = a.shape[0]
    kernel: Any = _merge_tile
    merged = torch.empty_like(weight, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    with torch.cuda.device(weight.device):
        kernel[grid](
            weight,
            b,
            a,
            merged,
            rows,
            columns,
            rank,
            *weight.stride(),
            *b.stride(),
            *a.stride(),
            scaling,
            RANK=max(16, triton.next_power_of_2(rank)),
            TILE=_TILE,
        )
    return merged


@triton.jit
def _round_row(
    weight, rounded, scales, columns, weight_stride, rounded_stride, scale_stride, least_scale, HELD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight += row * weight_stride
    rounded += row * rounded_stride
    at = tl.arange(0, HELD)
    largest = tl.zeros([HELD], dtype=tl.float32)
    for start in range(0, columns, HELD):
        value = tl.load(weight + start + at, mask=at < columns - start, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    # A maximum over all would ignore NaN.
    nothing = tl.sum(tl.where(largest == largest, 0.0, largest))
    scale = tl.maximum(tl.math.div_rn(tl.max(largest) + nothing, 448.0), least_scale, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales + row * scale_stride, scale)
    for start in range(0, columns, HELD):
        there = at < columns - start
        value = tl.load(weight + start + at, mask=there, other=0.0).to(tl.float32)
        tl.store(rounded + start + at, tl.math.div_rn(value, scale).to(rounded.dtype.element_ty), mask=there)


@triton.jit
def _merge_tile(
    weight, b, a, merged, rows, columns, rank,
    weight_row, weight_column, b_row, b_rank, a_rank, a_column,
    scaling, RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    inner = tl.arange(0, RANK)
    there = (row < rows) & (column < columns)
    left = tl.load(b + row * b_row + inner[None, :] * b_rank, mask=(row < rows) & (inner[None, :] < rank), other=0.0)
    right = tl.load(
        a + inner[:, None] * a_rank + column * a_column, mask=(inner[:, None] < rank) & (column < columns), other=0.0
    )
    delta = tl.dot(left.to(tl.float32) * scaling, right.to(tl.float32), input_precision="ieee")
    before = tl.load(weight + row * weight_row + column * weight_column, mask=there, other=0.0).to(tl.float32)
    tl.store(merged + row * columns + column, (before + delta).to(merged.dtype.element_ty), mask=there)
