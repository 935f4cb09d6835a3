"""Kernels that merge and round weights, against torch's operations. Not part of `make test`.

PYTHONPATH=src:. python -m pytest tests/gpu/test_row_kernels_on_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from lachesis.transport.float8 import FP8, by_rows
from lachesis.transport.row_kernels import merge

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with 8-bit floats"
)


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


@pytest.mark.parametrize(("shape", "rank"), [((64, 64), 16), ((70, 130), 4), ((33, 200), 128), ((4096, 512), 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_is_merged_in_float32_and_rounded_once(shape: tuple[int, int], rank: int, dtype: torch.dtype):
    matrix = weight(*shape).to("cuda", dtype)
    b, a = torch.randn(shape[0], rank, device="cuda") * 0.1, torch.randn(rank, shape[1], device="cuda") * 0.1
    exact = matrix.double() + 0.7 * (b.double() @ a.double())
    found = merge(matrix, b, a, scaling=0.7)
    if dtype == torch.float32:
        assert torch.allclose(found.double(), exact, rtol=0, atol=1e-5)
    else:
        assert (found != exact.to(dtype)).float().mean() < 0.001, "but where float32 is at the middle of two"
    assert torch.equal(found, merge(matrix, b, a, scaling=0.7))
    turned = matrix.mT.contiguous().mT
    assert torch.equal(found, merge(turned, b, a, scaling=0.7))
