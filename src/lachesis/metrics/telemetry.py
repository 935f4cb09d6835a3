"""From what a step measured to one record for the sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lachesis.common.types import EvalResult, Group, StepRecord
from lachesis.metrics.groups import group_metrics
from lachesis.metrics.hub import MetricsHub
from lachesis.metrics.values import Mean, MetricValue, Sum, merge_metrics

# Counters that are seconds: a mean over ranks says more than their sum.
_SECONDS = ("generation_time", "reward_time", "hidden_reward_time")


class Telemetry:
    """Merges what the policy, the feed and the groups say, and reduces it once.

    Args:
        hub: the sinks and the health rules.
        reduce: over all ranks, to numbers.
        reward_names: names of the reward functions, in the order of ``Sample.rewards``.
        device_memory: bytes (allocated at peak, reserved) since the last call; ``None`` without a GPU.
    """

    def __init__(
        self,
        *,
        hub: MetricsHub,
        reduce: Callable[[Mapping[str, MetricValue]], dict[str, float]],
        reward_names: Sequence[str],
        device_memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._hub = hub
        self._reduce = reduce
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
        values = self._reduce(merge_metrics([metrics, counted, of_groups]))
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
