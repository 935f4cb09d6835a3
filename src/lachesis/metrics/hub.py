"""Hub that turns a step's measurements into one record for every sink, and keeps sink failures from training."""

from __future__ import annotations

import errno
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lachesis.common.errors import LachesisError, RunRemoved
from lachesis.common.types import UNKNOWN_VERSIONS, EvalResult, Finding, Group, StepRecord
from lachesis.metrics.health.monitor import HealthMonitor
from lachesis.metrics.names import BY_ENVIRONMENT, BY_SOURCE
from lachesis.metrics.values import Max, Mean, Metrics, MetricValue, Sum, merge_metrics, reduce_metrics

logger = logging.getLogger("lachesis")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Counters in seconds.
_SECONDS = ("generation_time", "reward_time", "hidden_reward_time")


class Sink(ABC):
    """Sink that receives every step record in order. A sink that raises is reported once and dropped, never fatal.

    Attributes:
        waited_for: the next step waits for the sink, because its answer may end the run.
    """

    waited_for = False

    @abstractmethod
    def write(self, record: StepRecord) -> None:
        """Take one finished step."""

    def evaluation(self, result: EvalResult) -> None:
        """Take an evaluation that belongs to no step (before the first)."""
        return None

    def close(self) -> None:
        """Flush and finish."""
        return None


class MetricsHub:
    """Hub of the sinks and, if given, of the health monitor whose findings it adds to each record.

    A sink (or the monitor) that raises is reported once, as a warning of one sentence on the logger
    ``lachesis``, and dropped; the caller notices nothing, unless the run directory was removed.

    Args:
        sinks: written to in this order; a report sink comes after those whose files it reads.
        monitor: examines every record before the sinks get it.
    """

    def __init__(self, sinks: Sequence[Sink], *, monitor: HealthMonitor | None = None) -> None:
        self._sinks = list(sinks)
        self._monitor = monitor

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """Return the sinks that still work."""
        return tuple(self._sinks)

    @property
    def waited_for(self) -> bool:
        """Return True if training waits until the sinks have got a step."""
        return any(sink.waited_for for sink in self._sinks)

    def emit(self, record: StepRecord) -> StepRecord:
        """Give a finished step to every sink; return the record that they got, with its findings."""
        record = replace(record, findings=(*record.findings, *self._examine(record)))
        self._each(lambda sink: sink.write(record), f"step {record.step}")
        return record

    def evaluation(self, result: EvalResult) -> None:
        """Give an evaluation that belongs to no step (before the first) to every sink."""
        if self._monitor is not None:
            self._monitor.evaluation(result)
        self._each(lambda sink: sink.evaluation(result), f"the evaluation at step {result.step}")

    def close(self) -> None:
        """Close every sink. Idempotent."""
        self._each(lambda sink: sink.close(), "the end of the run")
        self._sinks.clear()

    def _examine(self, record: StepRecord) -> Sequence[Finding]:
        if self._monitor is None:
            return ()
        try:
            return self._monitor.examine(record)
        except Exception as error:
            self._monitor = None
            logger.warning("%s", _sentence("the health rules", f"step {record.step}", error))
            return ()

    def _each(self, action: Callable[[Sink], None], occasion: str) -> None:
        for sink in tuple(self._sinks):
            try:
                action(sink)
            except RunRemoved:  # whose message is complete
                self._sinks.clear()
                raise
            except Exception as error:
                self._sinks.remove(sink)
                logger.warning("%s", _sentence(type(sink).__name__, occasion, error))
                with suppress(Exception):  # it failed and was reported; this releases its resources
                    sink.close()


def _sentence(who: str, occasion: str, error: Exception) -> str:
    """Return the failure, its reason and its consequence, in one line."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        where = f" while writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{where}: {who} failed at {occasion} and is off for the rest of this run; training "
            "continues, but free some space before the next checkpoint"
        )
    if isinstance(error, LachesisError):
        return f"{error.message}; {who} is off for the rest of this run, and training continues ({occasion})"
    reason = " ".join(str(error).split()) or "no message"
    return (
        f"{who} failed at {occasion} and is off for the rest of this run, and training continues: "
        f"{type(error).__name__}: {reason}"
    )


@dataclass(kw_only=True, eq=False)
class HubTelemetry:
    """Telemetry that merges the values of the policy (all ranks), the feed and the groups, and reduces them once.

    This, and the work of sinks, happens during the next step, so a slow disk does not delay training. At most one step
    is in progress; :meth:`flush` waits for it.

    Args:
        hub: the sinks and the health rules.
        reward_names: names of the reward functions, in the order of ``Sample.rewards``.
        device_memory: bytes (allocated at peak, reserved) since the last call; ``None`` without a GPU.
    """

    hub: MetricsHub
    reward_names: Sequence[str]
    device_memory: Callable[[], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="telemetry")
        self._telling: Future[None] | None = None

    def evaluation(self, result: EvalResult | None) -> None:
        """Report to the sinks an evaluation before the first step, if there was one."""
        if result is not None:
            self.hub.evaluation(result)

    def emit(
        self,
        *,
        step: int,
        metrics: dict[str, MetricValue],
        counters: dict[str, float],
        groups: tuple[Group, ...],
        evaluation: EvalResult | None,
    ) -> None:
        """Report a finished step to the sinks, once they have the previous one.

        Raises as :meth:`flush`.
        """
        self.flush()
        measured: list[Metrics] = [metrics]
        if self.device_memory is not None:
            allocated, reserved = self.device_memory()
            measured.append({"gpu_memory_gb": Mean(allocated / 1e9), "gpu_memory_reserved_gb": Mean(reserved / 1e9)})
        told = partial(self._tell, measured, counters=counters)
        self._telling = self._beside.submit(told, StepRecord(step, {}, groups, evaluation, ended=time.time()))
        if self.hub.waited_for:
            self.flush()

    def flush(self) -> None:
        """Wait until the sinks have all that was reported.

        Raises any error on the way to them, which is a bug.
        """
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.result()

    def close(self) -> None:
        """Report the remaining values, and close the sinks.

        Idempotent. Raises as :meth:`flush`.
        """
        try:
            self.flush()
        finally:
            self._beside.shutdown()
            self.hub.close()

    def _tell(self, measured: Sequence[Metrics], record: StepRecord, *, counters: dict[str, float]) -> None:
        counted = {name: Mean(n) if name in _SECONDS else Sum(n) for name, n in counters.items()}
        # The batch was trained on by the weights before this step.
        of_groups = group_metrics(record.groups, reward_names=self.reward_names, version=record.step - 1)
        values = reduce_metrics(merge_metrics([*measured, counted, of_groups]))
        self.hub.emit(replace(record, values=values | throughput(values)))


def throughput(values: Mapping[str, float]) -> dict[str, float]:
    """Return tokens a second, generated and trained (forward and backward), if both parts are known."""
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
    """Return the metric values of one batch; ``version`` is that of the weights it was trained on.

    They describe the groups generated for it, even if replayed groups took their place: groups that are chosen for
    their rewards would make the curve rise without learning. ``reward_std`` is the mean over groups of the deviation (n
    - 1) within the group. If any sample is older than the weights, ``staleness/N`` is the share of samples whose first
    token is N versions old. Each of several sources has the same metrics as ``source/NAME/METRIC``.
    """
    groups = [group.generated for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    metrics = _measured(groups, version)
    for i, name in enumerate(reward_names):
        values = [v for s in samples if i < len(s.rewards) and (v := s.rewards[i]) is not None]
        metrics[f"rewards/{name}/mean"] = Mean(sum(values), len(values))
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = Mean(_stdev(values))
    for source in dict.fromkeys(group.prompt.source for group in groups if group.prompt.source):
        measured = _measured([group for group in groups if group.prompt.source == source], version)
        metrics |= {f"{BY_SOURCE}{source}/{metric}": value for metric, value in measured.items()}
    return metrics | _rewards_by_environment(groups)


def _measured(groups: Sequence[Group], version: int) -> dict[str, MetricValue]:
    """Return the measurements of all groups of a batch, and of the groups of each named source."""
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
    if max(ages, default=0) > 0:
        metrics |= {f"staleness/{n}": Mean(ages.count(n), len(ages)) for n in range(max(ages) + 1)}
    return metrics


def _rewards_by_environment(groups: Sequence[Group]) -> dict[str, MetricValue]:
    """Return the mean reward of each environment of the rollout API that groups of this batch came from."""
    rewards: dict[Any, list[float]] = {}
    for group in groups:
        columns = group.prompt.columns
        if columns.get("env_id") is not None:
            environment = columns.get("environment", columns["env_id"])
            rewards.setdefault(environment, []).extend(known for known in group.rewards if known is not None)
    return {f"{BY_ENVIRONMENT}{name}": Mean(sum(values), len(values)) for name, values in rewards.items()}


def _deviation(group: Group) -> float | None:
    """Return the standard deviation of a group's rewards; None if fewer than two are known."""
    rewards = [reward for reward in group.rewards if reward is not None]
    if len(rewards) < 2:
        return None
    return _stdev(rewards) if min(rewards) != max(rewards) else 0.0


def _stdev(values: Sequence[float]) -> float:
    """Return the standard deviation (n - 1) of at least two values.

    The function of `statistics` is exact to the last bit, but takes 50 times as long: milliseconds for a step.
    """
    mean = sum(values) / len(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)  # a square could overflow
