"""Descriptions of metrics: title, unit, healthy range and one plain sentence for each name the loop emits.

The report, the health rules, the console and the documentation use them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lachesis.common.types import EvalResult

# Beginning of the name of the mean reward of one environment of the rollout API; its name there follows, or its number
# where the API tells no names.
BY_ENVIRONMENT = "reward_of_environment/"
# Beginning of the metrics of one of several sources, whose name and the name of the metric follow.
BY_SOURCE = "source/"
# Beginnings of the seconds of one engine, whose host and port follow, and of one rank, whose number follows.
GENERATION_OF, TRAINING_OF = "generation_time/", "train_time/"
# Hits in the prefix caches of all engines, and the beginning of those of one of several.
PREFIX_HITS = "prefix_cache_hit_rate"
PREFIX_HITS_OF = f"{PREFIX_HITS}/"
# Of transfers: how long each of several engines received, and how long, and how much, each of several ranks sent.
RECEIVING_OF, SENDING_OF, SENT_BY = "receive_time/", "send_time/", "sent_gb/"
# Prefixes of the metrics of one GPU; its number on its machine follows, as in nvidia-smi.
GPU_UTILIZATION, GPU_MEMORY_IN_USE = "gpu_utilization/", "gpu_memory_in_use_gb/"

Unit = Literal["", "share", "tokens", "tokens/s", "s", "GB", "nats", "sequences", "groups", "versions"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of one metric.

    ``healthy`` is ``(low, high)``, either of them ``None`` if that side has no bound; ``None`` as a whole if no range
    is known. A range that is documented for particular models and rewards only is not ``judged``: no value is then
    called unusual. A ``share`` is a fraction between 0 and 1 and shown in percent.
    """

    name: str
    title: str
    unit: Unit
    explanation: str
    healthy: tuple[float | None, float | None] | None = None
    judged: bool = True

    def is_usual(self, value: float) -> bool:
        """Return True if a value lies in the healthy range, or there is none."""
        low, high = self.healthy or (None, None)
        return (low is None or value >= low) and (high is None or value <= high)


def _described() -> Iterator[Metric]:
    """Yield the metrics that ``metrics.toml`` describes."""
    document: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
    for name, row in document.items():
        bounds = (row.get("lowest"), row.get("highest"))
        healthy = None if bounds == (None, None) else bounds
        yield Metric(name, row["title"], row.get("unit", ""), row["explanation"], healthy, row.get("judged", True))


METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _described()}


# Title, unit and explanation of metrics of one engine, rank or GPU, which the rest of the name says.
_FAMILIES: Mapping[str, tuple[str, Unit, str]] = {
    GENERATION_OF: ("{}", "s", "Time in which the engine {} had requests under way."),
    PREFIX_HITS_OF: ("{}", "share", "Share of the tokens of prompts that the engine {} had in its prefix cache."),
    TRAINING_OF: ("rank {}", "s", "Forward and backward passes of rank {}, with its waits for other ranks amid them."),
    RECEIVING_OF: ("{}", "s", "Time in which the engine {} received new weights and loaded them."),
    SENDING_OF: ("rank {}", "s", "Time in which rank {} gathered weights for senders, and sent its own."),
    SENT_BY: ("rank {}", "GB", "Weights that rank {} sent to the engines."),
    GPU_UTILIZATION: (
        "GPU {}",
        "share",
        "Share of the time in which GPU {} computed anything, by NVML.",
    ),
    GPU_MEMORY_IN_USE: ("GPU {}", "GB", "Memory of this GPU that all its processes take together, at most, by NVML."),
}


def describe(name: str) -> Metric:
    """Return the description of a metric.

    ``rewards/NAME/mean|std``, ``source/NAME/METRIC``, ``staleness/N``, ``reward_of_environment/NAME``,
    ``generation_time/HOST:PORT``, ``prefix_cache_hit_rate/HOST:PORT``, ``train_time/RANK``,
    ``receive_time/HOST:PORT``, ``send_time/RANK``, ``sent_gb/RANK``, ``gpu_utilization/N``,
    ``gpu_memory_in_use_gb/N`` and unknown names get one of the name.
    """
    known = METRICS.get(name)
    if known is not None:
        return known
    if name.startswith(BY_SOURCE):
        source, _, measured = name.removeprefix(BY_SOURCE).partition("/")
        whole = describe(measured)
        words = f"Of the groups of the source {source} alone: {whole.explanation}"
        return replace(whole, name=name, title=f"{whole.title}: {source}", explanation=words)
    distance = name.removeprefix("staleness/")
    if name.startswith("staleness/") and distance.isdecimal():
        what = f"Share of the completions whose first token is {distance} updates behind the policy."
        return Metric(name, f"Staleness {distance}", "share", what)
    if name.startswith(BY_ENVIRONMENT):
        environment = name.removeprefix(BY_ENVIRONMENT)
        title = f"Environment {environment}" if environment.isdecimal() else environment
        return Metric(name, title, "", f"Mean reward of what environment {environment} sent.")
    for prefix, (title, unit, explanation) in _FAMILIES.items():
        if name.startswith(prefix):
            of = name.removeprefix(prefix)
            return Metric(name, title.format(of), unit, explanation.format(of))
    function, _, statistic = name.removeprefix("rewards/").rpartition("/")
    if name.startswith("rewards/") and function and statistic == "mean":
        return Metric(name, f"Reward {function}", "", f"Mean reward of the function {function}.", (0.15, None))
    if name.startswith("rewards/") and function and statistic == "std":
        return Metric(name, f"Deviation of {function}", "", f"Deviation of the rewards of {function}.")
    return Metric(name, name.replace("_", " ").replace("/", " "), "", "")


def reward_functions(values: Mapping[str, float]) -> list[str]:
    """Return the names of reward functions that have a mean among the values of a step, in their order."""
    return [
        name[len("rewards/") : -len("/mean")]
        for name in values
        if name.startswith("rewards/") and name.endswith("/mean")
    ]


def evaluation_values(result: EvalResult) -> dict[str, float]:
    """Return an evaluation as metric values, for sinks that know only names and numbers."""
    return {
        "evaluation/accuracy": result.accuracy,
        "evaluation/mean_reward": result.mean_reward,
        **({} if result.pass_at_k is None else {"evaluation/pass_at_k": result.pass_at_k}),
        "evaluation/mean_length": result.mean_length,
        "evaluation/seconds": result.seconds,
        **{f"evaluation/{name}/{key}": value for name, of in result.benchmarks.items() for key, value in of.items()},
        **{
            f"{BY_SOURCE}{source}/evaluation/{name}": value
            for source, values in result.by_source.items()
            for name, value in values.items()
        },
    }


def benchmark_words(result: EvalResult) -> list[str]:
    """Return "gsm8k 62 % (59 to 65 %, n = 1319)" of each named benchmark of an evaluation."""
    return [
        f"{name} {format_share(of['mean'])} ({100 * of['mean_low']:.0f} to {100 * of['mean_high']:.0f} %, "
        f"n = {of['problems']:.0f})"
        for name, of in result.benchmarks.items()
    ]


def format_number(value: float) -> str:
    """Format a number for people: three significant digits, thousands as 12.3k, tiny ones as 1e-06."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("-inf" if value < 0 else "inf")
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def format_share(value: float) -> str:
    """Format a share in percent: 7 %, 93 %, 99.6 %; more digits only if rounding would give 100 % or 0 %."""
    percent = 100.0 * value
    if not math.isfinite(percent):
        return format_number(percent)
    rounded = round(percent)
    near_edge = rounded in (0, 100) and percent != rounded
    return f"{percent:.1f} %" if near_edge else f"{rounded} %"


def format_seconds(seconds: float) -> str:
    """Format a duration for people: 0.4 s, 42 s, 3m 05s, 2h 10m, 1d 04h."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"
