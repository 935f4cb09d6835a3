"""Descriptions of metrics: title, unit, healthy range and one plain sentence for each name the loop emits.

Pages and the documentation use them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lachesis.metrics.names import BY_ENVIRONMENT, BY_SOURCE

Unit = Literal["", "share", "tokens", "tokens/s", "s", "GB", "nats", "sequences", "groups", "versions"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of one metric.

    ``healthy`` is ``(low, high)``, each ``None`` if that side has no bound; it is ``None`` if no range is known. A
    range that holds only for particular models and rewards is not ``judged``: no value is then called unusual. A
    ``share`` is a fraction between 0 and 1 and shown in percent.
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


_DESCRIBED: Mapping[str, Metric] = {metric.name: metric for metric in _described()}
# Names that end in a slash are of one engine or rank each, which the rest of the name gives.
METRICS: Mapping[str, Metric] = {name: metric for name, metric in _DESCRIBED.items() if not name.endswith("/")}


def describe(name: str) -> Metric:
    """Return the description of a metric.

    ``rewards/NAME/mean|std``, ``source/NAME/METRIC``, ``staleness/N``, ``reward_of_environment/NAME``,
    ``generation_time/HOST:PORT``, ``prefix_cache_hit_rate/HOST:PORT``, ``train_time/RANK``,
    ``receive_time/HOST:PORT``, ``send_time/RANK``, ``sent_gb/RANK`` and unknown names get one of the name.
    """
    known = METRICS.get(name)
    if known is not None:
        return known
    if name.startswith(BY_SOURCE):
        source, _, measured = name.removeprefix(BY_SOURCE).partition("/")
        whole = describe(measured)
        words = f"Only groups of the source {source}: {whole.explanation}"
        return replace(whole, name=name, title=f"{whole.title}: {source}", explanation=words)
    distance = name.removeprefix("staleness/")
    if name.startswith("staleness/") and distance.isdecimal():
        what = f"Share of the completions whose first token is {distance} updates behind the policy."
        return Metric(name, f"Staleness {distance}", "share", what)
    if name.startswith(BY_ENVIRONMENT):
        environment = name.removeprefix(BY_ENVIRONMENT)
        title = f"Environment {environment}" if environment.isdecimal() else environment
        return Metric(name, title, "", f"Mean reward of the groups of environment {environment}.")
    prefix, _, of = name.partition("/")
    if (family := _DESCRIBED.get(f"{prefix}/")) is not None:
        return replace(family, name=name, title=family.title.format(of), explanation=family.explanation.format(of))
    function, _, statistic = name.removeprefix("rewards/").rpartition("/")
    if name.startswith("rewards/") and function and statistic == "mean":
        return Metric(name, f"Reward {function}", "", f"Mean reward of the function {function}.", (0.15, None))
    if name.startswith("rewards/") and function and statistic == "std":
        return Metric(name, f"Deviation of {function}", "", f"Deviation of the rewards of {function}.")
    return Metric(name, name.replace("_", " ").replace("/", " "), "", "")
