"""From what a step measured to one record for the sinks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from lachesis.common.types import UNKNOWN_VERSIONS, EvalResult, Group, StepRecord
from lachesis.metrics.hub import MetricsHub
from lachesis.metrics.values import Max, Mean, MetricValue, Sum, merge_metrics, reduce_metrics

# Counters that are seconds.
_SECONDS = ("generation_time", "reward_time", "hidden_reward_time")


class HubTelemetry:
    """Merges what the policy (of all ranks), the feed and the groups say, and reduces it once.

    Args:
        hub: the sinks and the health rules.
        reward_names: names of the reward functions, in the order of ``Sample.rewards``.
        device_memory: bytes (allocated at peak, reserved) since the last call; ``None`` without a GPU.
    """

    def __init__(
        self,
        *,
        hub: MetricsHub,
        reward_names: Sequence[str],
        device_memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._hub = hub
        self._reward_names = tuple(reward_names)
        self._device_memory = device_memory

    def evaluation(self, result: EvalResult | None) -> None:
        """Tell the sinks of an evaluation before the first step, if there was one."""
        if result is not None:
            self._hub.evaluation(result)

    def emit(
        self,
        *,
        step: int,
        metrics: dict[str, MetricValue],
        counters: dict[str, float],
        groups: tuple[Group, ...],
        evaluation: EvalResult | None,
    ) -> None:
        """Tell the sinks of a finished step."""
        counted = {name: Mean(n) if name in _SECONDS else Sum(n) for name, n in counters.items()}
        # The batch was trained on by the weights before this step.
        of_groups = group_metrics(groups, reward_names=self._reward_names, version=step - 1)
        values = reduce_metrics(merge_metrics([metrics, counted, of_groups]))
        values |= throughput(values)
        if self._device_memory is not None:
            allocated, reserved = self._device_memory()
            values |= {"gpu_memory_gb": allocated / 1e9, "gpu_memory_reserved_gb": reserved / 1e9}
        self._hub.emit(StepRecord(step=step, values=values, groups=groups, evaluation=evaluation))


def throughput(values: Mapping[str, float]) -> dict[str, float]:
    """Tokens a second that were generated, and that went forward and backward, where both parts are known."""
    pairs = {
        "generation_tokens_per_s": ("tokens_generated", "generation_time"),
        "train_tokens_per_s": ("tokens_forward", "train_time"),
    }
    return {
        name: values[tokens] / values[seconds]
        for name, (tokens, seconds) in pairs.items()
        if values.get(tokens) and values.get(seconds)
    }


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
