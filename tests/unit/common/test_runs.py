from __future__ import annotations

import pytest

from lachesis.common.runs import runs


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], []),
        ([4, 6, 1], [[4, 6], [1]]),
        ([11, 3, 12, 10], [[11], [3], [12], [10]]),
        ([0, 0, 10, 0, 1], [[0, 0, 10, 0], [1]]),
    ],
)
def test_runs_are_in_order_and_only_a_larger_item_exceeds_the_limit(items: list[int], expected: list[list[int]]):
    assert list(runs(items, size=lambda item: item, limit=10)) == expected
