"""Rounding a matrix's rows to float8 on a GPU, against the same on a CPU. Not part of `make test`.

PYTHONPATH=src:. python -m pytest tests/gpu/test_rows_on_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from lachesis.transport.float8 import FP8, by_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def weight(rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(rows + columns)
    return (torch.randn(rows, columns) * torch.rand(rows, 1)).bfloat16()


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 4096), (5, 14336), (3, 20000), (300, 16)])
def test_rows_are_rounded_as_on_a_cpu(shape: tuple[int, int]):
    matrix = weight(*shape)
    matrix[0] = 0
    rounded, scales = by_rows(matrix)
    held, held_scales = (
        torch.zeros(shape[0] + 2, shape[1], dtype=torch.uint8, device="cuda").view(FP8),
        torch.zeros(shape[0] + 2, 1, device="cuda"),
    )
    by_rows(matrix.cuda(), out=(held[1:-1], held_scales[1:-1]))
    assert torch.equal(held[1:-1].view(torch.uint8).cpu(), rounded.view(torch.uint8))
    assert torch.equal(held_scales[1:-1].cpu(), scales)
    assert not held[[0, -1]].float().any() and not held_scales[[0, -1]].any()


def test_what_is_no_number_stays_visible():
    matrix = weight(4, 100).cuda()
    matrix[2, 70] = torch.nan
    rounded, scales = by_rows(matrix)
    assert scales.isnan().flatten().tolist() == [False, False, True, False]
    assert rounded.float().isnan().any(dim=1).tolist() == [False, False, True, False]
