"""What a batch's groups say: rewards, lengths, truncation, staleness. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lachesis.common.types import UNKNOWN_VERSIONS, Group
from lachesis.metrics.values import Max, Mean, MetricValue, Sum


def group_metrics(groups: Sequence[Group], *, reward_names: Sequence[str], version: int) -> dict[str, MetricValue]:
    """Metric values of one batch; ``version`` is that of the weights it was trained on.

    They are of what was generated for it, also where a replayed group took its place: groups that are chosen for
    their rewards would have the curve rise without any learning. ``reward_std`` is the mean over groups of the
    deviation (n - 1) within the group.
    """
    groups = [group.generated for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    deviations = [deviation for group in groups if (deviation := _deviation(group)) is not None]
    lengths = [len(sample.completion_ids) for sample in samples]
    ages = [version - sample.versions.first for sample in samples if sample.versions != UNKNOWN_VERSIONS]
    metrics: dict[str, MetricValue] = {
        "reward": Mean(sum(rewards), len(rewards)),
        "reward_std": Mean(sum(deviations), len(deviations)),
        "zero_std_fraction": Mean(sum(deviation == 0.0 for deviation in deviations), len(deviations)),
        "completion_length/mean": Mean(sum(lengths), len(lengths)),
        "completion_length/max": Max(max(lengths, default=0)),
        "truncated_fraction": Mean(sum(s.finish_reason == "length" for s in samples), len(samples)),
        "staleness": Max(max(ages, default=-math.inf)),
        "groups": Sum(len(groups)),
    }
    for i, name in enumerate(reward_names):
        values = [v for s in samples if i < len(s.rewards) and (v := s.rewards[i]) is not None]
        metrics[f"rewards/{name}/mean"] = Mean(sum(values), len(values))
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = Mean(statistics.stdev(values))
    return metrics


def _deviation(group: Group) -> float | None:
    """Standard deviation of a group's rewards; None where fewer than two are known."""
    rewards = [reward for reward in group.rewards if reward is not None]
    if len(rewards) < 2:
        return None
    return statistics.stdev(rewards) if min(rewards) != max(rewards) else 0.0
