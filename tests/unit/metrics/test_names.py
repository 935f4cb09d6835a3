from __future__ import annotations

import math

import pytest

from lachesis.metrics.names import format_number, format_seconds, format_share, reward_functions
from lachesis.plugins.report.metric_descriptions import METRICS, describe


def test_every_metric_has_words_and_a_range_in_order() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.title and metric.explanation.endswith(".")
        if metric.healthy is not None:
            low, high = metric.healthy
            assert low is None or high is None or low <= high


def test_names_of_reward_functions_may_contain_anything() -> None:
    values = {"rewards/exact/match/mean": 0.5, "rewards/exact/match/std": 0.1, "reward": 0.5, "rewards/b/mean": 1.0}
    assert reward_functions(values) == ["exact/match", "b"]
    assert describe("rewards/exact/match/mean").title == "Reward exact/match"
    assert describe("rewards/exact/match/mean").healthy == (0.15, None)
    assert describe("rewards/b/std").healthy is None


def test_unknown_metric_is_described_by_its_name() -> None:
    assert describe("my_own/thing").title == "my own thing"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (1234.4, "1234"), (28_123, "28.1k"), (5.2e6, "5.2M"), (1e-6, "1e-06"), (0, "0"),
     (math.nan, "NaN"), (-math.inf, "-inf")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.07, "7 %"), (0.999, "99.9 %"), (1.0, "100 %"), (0.0, "0 %")])
def test_shares_say_100_percent_only_for_all(value: float, text: str) -> None:
    assert format_share(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (42.4, "42 s"), (185, "3m 05s"), (7800, "2h 10m"), (100_800, "1d 04h"), (-1, "0.0 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
