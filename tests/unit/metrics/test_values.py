from __future__ import annotations

import math

import pytest

from lachesis.metrics.values import Max, Mean, Sum, merge_metrics, reduce_metrics


def test_a_mean_is_weighted_and_a_single_value_is_itself():
    assert Mean(6.0, 4).merge(Mean(1.0, 1)).value() == pytest.approx(1.4)
    assert Mean(2.5).value() == 2.5


def test_a_mean_of_nothing_is_missing_and_not_zero():
    assert Mean(0.0, 0).value() is None
    assert Mean(0.0, 0).merge(Mean(3.0, 2)).value() == 1.5


def test_sums_and_maxima():
    assert Sum(2.0).merge(Sum(-5.0)).value() == -3.0
    assert Max(-2.0).merge(Max(-5.0)).value() == -2.0


def test_a_maximum_of_nothing_is_missing():
    nothing = Max(-math.inf)
    assert nothing.value() is None
    assert nothing.merge(Max(-3.0)).value() == -3.0


def test_the_order_of_merging_does_not_matter():
    parts = [{"a": Mean(1.0, 2), "b": Sum(1.0)}, {"b": Sum(4.0), "c": Max(1.0)}, {"a": Mean(5.0, 1), "c": Max(7.0)}]
    merged = reduce_metrics(merge_metrics(parts))
    assert merged == reduce_metrics(merge_metrics(reversed(parts)))
    assert merged == {"a": 2.0, "b": 5.0, "c": 7.0}


def test_merging_leaves_the_parts_as_they_are():
    first = {"a": Sum(1.0)}
    merge_metrics([first, {"a": Sum(2.0)}])
    assert first == {"a": Sum(1.0)}


def test_one_name_has_one_kind():
    with pytest.raises(TypeError, match="'loss' is both Sum and Mean"):
        merge_metrics([{"loss": Sum(1.0)}, {"loss": Mean(1.0)}])


def test_reduction_leaves_out_what_was_not_counted():
    assert reduce_metrics({"reward": Mean(0.0, 0), "groups": Sum(0.0)}) == {"groups": 0.0}


def test_nan_stays_nan():
    assert math.isnan(reduce_metrics({"loss": Mean(math.nan)})["loss"])
    assert math.isnan(reduce_metrics({"loss": Max(math.nan)})["loss"])
