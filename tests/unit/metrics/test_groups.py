from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from lachesis.common.types import UNKNOWN_VERSIONS, Group, VersionSpan
from lachesis.metrics.groups import group_metrics
from lachesis.metrics.values import Max, Mean, reduce_metrics

MakeGroup = Callable[..., Group]


def measure(groups: list[Group], *, names: tuple[str, ...] = ("right",), version: int = 4) -> dict[str, float]:
    return reduce_metrics(group_metrics(groups, reward_names=names, version=version))


def test_rewards_and_their_deviation_within_groups(make_group: MakeGroup):
    values = measure([make_group((0.0, 1.0, 1.0)), make_group((2.0, 2.0, 2.0)), make_group((0.0, 4.0, 2.0))])
    assert values["reward"] == pytest.approx(14 / 9)
    assert values["reward_std"] == pytest.approx((statistics.stdev((0, 1, 1)) + 0 + 2.0) / 3)
    assert values["zero_std_fraction"] == pytest.approx(1 / 3)
    assert values["groups"] == 3


def test_a_reward_that_is_not_known_counts_nowhere(make_group: MakeGroup):
    values = measure([make_group((None, 1.0, 3.0)), make_group((None, None, 5.0))])
    assert values["reward"] == 3.0
    assert values["reward_std"] == pytest.approx(statistics.stdev((1, 3))), "a group with one reward has no deviation"
    assert values["zero_std_fraction"] == 0.0


def test_without_any_reward_the_values_are_missing(make_group: MakeGroup):
    values = measure([make_group((None, None))])
    assert not {"reward", "reward_std", "zero_std_fraction", "rewards/right/mean"} & values.keys()
    assert values["groups"] == 1


def test_equal_rewards_have_no_deviation_in_spite_of_rounding(make_group: MakeGroup):
    assert measure([make_group((0.1,) * 7)])["zero_std_fraction"] == 1.0


def test_lengths_and_truncation(make_group: MakeGroup):
    short = make_group((0.0, 1.0), completions=[(1,), (1, 2, 3)])
    long = make_group((0.0, 1.0), completions=[(1, 2, 3, 4), (1, 2, 3, 5)], finish_reason="length")
    values = measure([short, long])
    assert (values["completion_length/mean"], values["completion_length/max"]) == (3.0, 4)
    assert values["truncated_fraction"] == 0.5


def test_staleness_counts_from_the_first_token_of_the_oldest_sample(make_group: MakeGroup):
    group = make_group((0.0, 1.0))
    old, new = group.samples
    mixed = replace(group, samples=(replace(old, versions=VersionSpan(1, 4)), replace(new, versions=VersionSpan(4, 4))))
    assert measure([mixed], version=4)["staleness"] == 3
    assert measure([replace(group, samples=(replace(new, versions=VersionSpan(4, 4)),))], version=4)["staleness"] == 0


def test_samples_of_an_unknown_version_are_neither_fresh_nor_stale(make_group: MakeGroup):
    group = make_group((0.0, 1.0))
    unknown = tuple(replace(sample, versions=UNKNOWN_VERSIONS) for sample in group.samples)
    assert "staleness" not in measure([replace(group, samples=unknown)], version=4)
    mixed = replace(group, samples=(unknown[0], group.samples[1]))
    assert measure([mixed], version=4)["staleness"] == 1


def test_a_replayed_group_does_not_make_generation_look_late(make_group: MakeGroup):
    group = make_group((0.0, 1.0))
    old = replace(group, samples=tuple(replace(sample, versions=VersionSpan(0, 0)) for sample in group.samples))
    without_signal = make_group((0.0, 0.0))
    assert measure([group, replace(old, replaces=without_signal)], version=4)["staleness"] == 1


def test_a_replayed_group_does_not_make_the_policy_look_better(make_group: MakeGroup):
    """What is drawn for its rewards says nothing of the policy: all values are of what was generated."""
    good, without_signal = make_group((0.0, 2.0)), make_group((0.0, 0.0))
    generated = measure([good, without_signal])
    assert generated["reward"] == 0.5 and generated["zero_std_fraction"] == 0.5
    assert measure([good, replace(good, replaces=without_signal)]) == generated


def test_every_reward_function_has_its_own_mean_and_deviation(make_group: MakeGroup):
    group = make_group((0.0, 1.0, 2.0))
    rows = [(1.0, 10.0), (3.0, None), (None, None)]
    samples = tuple(replace(s, rewards=row) for s, row in zip(group.samples, rows, strict=True))
    values = measure([replace(group, samples=samples)], names=("right", "short"))
    assert values["rewards/right/mean"] == 2.0
    assert values["rewards/right/std"] == pytest.approx(statistics.stdev((1, 3)))
    assert values["rewards/short/mean"] == 10.0
    assert "rewards/short/std" not in values


def test_no_groups_give_counts_and_no_means():
    values = measure([])
    assert values["groups"] == 0
    assert "reward" not in values


def test_values_can_be_merged_over_ranks(make_group: MakeGroup):
    metrics = group_metrics([make_group((0.0, 1.0))], reward_names=("right",), version=4)
    assert metrics["reward"] == Mean(1.0, 2)
    assert isinstance(metrics["staleness"], Max)
    assert isinstance(metrics["completion_length/max"], Max)
