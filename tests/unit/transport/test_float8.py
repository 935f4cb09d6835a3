from __future__ import annotations

import math

import pytest
import torch

from lachesis.transport.digest import digests
from lachesis.transport.float8 import FP8, by_rows


def weight(rows: int = 7, columns: int = 33) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_each_row_is_rounded_to_the_grid_of_its_own_scale():
    matrix = weight()
    rounded, scales = by_rows(matrix)
    assert (rounded.dtype, rounded.shape, scales.dtype, scales.shape) == (FP8, (7, 33), torch.float32, (7, 1))
    assert torch.equal(rounded.float().abs().amax(dim=1), torch.full((7,), 448.0)), "the largest of a row is the last"
    for row in range(7):
        scale = float(torch.tensor(float(matrix[row].float().abs().max())) / 448.0)
        assert float(scales[row]) == scale
        grid = torch.arange(256, dtype=torch.uint8).view(FP8).double()
        grid = grid[grid.isfinite()]
        for number, held in zip(matrix[row].double(), rounded[row].double(), strict=True):
            nearest = (grid - number / scale).abs().min()
            assert abs(float(held - number / scale)) <= float(nearest) * (1 + 1e-5) + 1e-6


def test_a_row_is_rounded_alike_alone_and_among_others():
    """So that rows can be fused, cut and sent apart."""
    whole, scales = by_rows(weight())
    parts = [by_rows(part) for part in (weight(), weight()[2:5], weight()[5:])]
    for (rounded, scale), start in zip(parts, (0, 2, 5), strict=True):
        assert torch.equal(rounded.view(torch.uint8), whole[start : start + len(rounded)].view(torch.uint8))
        assert torch.equal(scale, scales[start : start + len(rounded)])


def test_rows_can_be_rounded_to_where_an_engine_has_them():
    expected, scales = by_rows(weight())
    matrix, all_scales = torch.zeros(9, 33, dtype=torch.uint8).view(FP8), torch.zeros(9, 1)
    found = by_rows(weight(), out=(matrix[1:8], all_scales[1:8]))
    assert torch.equal(matrix[1:8].view(torch.uint8), expected.view(torch.uint8))
    assert found[0].data_ptr() == matrix[1].data_ptr() and torch.equal(all_scales[1:8], scales)
    assert not matrix[0].float().any() and not matrix[8].float().any() and not all_scales[[0, 8]].any()


def test_zeros_stay_zeros_and_scales_positive():
    rounded, scales = by_rows(torch.zeros(2, 4, dtype=torch.bfloat16))
    assert not rounded.float().any() and float(scales.min()) == pytest.approx(1 / (448 * 512))


def test_what_is_no_number_stays_visible():
    rounded, scales = by_rows(torch.tensor([[1.0, math.nan]]))
    assert rounded.float().isnan().any() and scales.isnan().all()


def test_digests_of_eight_bits_are_those_of_their_bytes():
    rounded, _ = by_rows(weight(6, 32))
    expected = digests({"w": rounded.view(torch.uint8)})["w"]
    transposed = rounded.t().contiguous().t()
    assert digests({"a": rounded, "b": transposed, "c": rounded.clone()}) == dict.fromkeys("abc", expected)
    other = rounded.view(torch.uint8).clone()
    other[3, 4] ^= 1
    assert digests({"w": other.view(FP8)})["w"] != expected
