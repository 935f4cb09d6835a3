from __future__ import annotations

import math

import pytest

from lachesis.metrics.sinks.jsonl import Histogram, histogram


def test_each_value_is_in_one_range_and_the_ends_are_in():
    assert histogram([0.0, 0.5, 1.0, 0.99], bins=2) == Histogram(0.0, 1.0, (1, 3))
    assert histogram([-1.0, 3.0, 0.0], bins=4) == Histogram(-1.0, 3.0, (1, 1, 0, 1))


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_equal_values_are_one_range(value: float):
    assert histogram([value, None, value]) == Histogram(value, value, (2,))


def test_what_is_not_known_or_not_finite_is_left_out():
    assert histogram([None, math.nan, math.inf]) is None
    assert histogram([1.0, math.inf, 2.0], bins=2) == Histogram(1.0, 2.0, (1, 1))
