"""Curves of a report: the metrics drawn together, their points, and the parts of a step's time."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lachesis.metrics.names import (
    BY_ENVIRONMENT,
    BY_SOURCE,
    GENERATION_OF,
    PREFIX_HITS,
    PREFIX_HITS_OF,
    RECEIVING_OF,
    SENDING_OF,
    TRAINING_OF,
    reward_functions,
)
from lachesis.metrics.sinks.jsonl import MetricsLog, StepLine
from lachesis.plugins.report.metric_descriptions import describe

MAX_POINTS = 2000
MAX_BARS = 400
# A line of at least this many steps that varies by no more than this share of its value is shown as a number.
_FLAT_STEPS, _FLAT = 5, 1e-3

TRAINING = (("train_time", "Training"), ("sync_time", "Optimizer and sync"))
SAMPLING = (("generation_time", "Generation"), ("reward_time", "Rewards"))
# Label instead of sampling if that happens elsewhere: during training, or in environments.
WAITING = (("data_fetch_time", "Waiting for a batch"),)

LOGGED = "reward_metrics/"


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """Plan of one chart: the metrics drawn in it, the first of which gives title, unit and healthy range.

    ``band`` names the metric whose size is drawn on both sides of the line, ``log`` allows a logarithmic axis,
    ``exact`` forbids smoothing, ``floor`` and ``ceiling`` are ends that the axis shows, ``least`` is the smallest range
    it covers, so that noise does not look like a change.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    names: tuple[str, ...]
    title: str = ""
    band: str = ""
    wide: bool = False
    log: bool = False
    exact: bool = False
    floor: float | None = None
    ceiling: float | None = None
    least: float = 0.0


class _Tables(BaseModel):
    """The tables of ``charts.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    charts: tuple[ChartPlan, ...]
    labels: dict[str, str]
    of_a_source: dict[str, dict[str, Any]]


_TABLES = _Tables.model_validate(tomllib.loads(Path(__file__).with_name("charts.toml").read_text(encoding="utf-8")))
CHARTS, LABELS, OF_A_SOURCE = _TABLES.charts, _TABLES.labels, _TABLES.of_a_source


def charts(log: MetricsLog) -> list[dict[str, Any]]:
    """Return all charts that have data."""
    functions = reward_functions(log.steps[-1].values) if log.steps else []
    by_function = ChartPlan(tuple(f"rewards/{name}/mean" for name in functions), title="Rewards by function")
    by_environment = ChartPlan(_beginning_with(BY_ENVIRONMENT, log), title="Rewards by environment")
    by_source = [
        ChartPlan(tuple(name for name in _beginning_with(BY_SOURCE, log) if name.endswith(f"/{metric}")), **options)
        for metric, options in OF_A_SOURCE.items()
    ]
    several = [plan for plan in (by_function, by_environment, *by_source) if len(plan.names) > 1]
    processes = (
        ChartPlan(_beginning_with(GENERATION_OF, log), title="Generation by engine", floor=0.0),
        ChartPlan((PREFIX_HITS, *_beginning_with(PREFIX_HITS_OF, log)), floor=0.0, ceiling=1.0),
        ChartPlan(_beginning_with(TRAINING_OF, log), title="Training by rank", floor=0.0),
        ChartPlan(_beginning_with(RECEIVING_OF, log), title="Transfer by engine", floor=0.0),
        ChartPlan(_beginning_with(SENDING_OF, log), title="Transfer by rank", floor=0.0),
    )
    parts = (plan for plan in processes if plan.names)
    plans = (*CHARTS[:2], *several, *CHARTS[2:], *parts, *logged_charts(log))
    if not any(line.values.get("staleness", 0.0) > 0 for line in log.steps):  # as in synchronous runs
        plans = tuple(plan for plan in plans if "staleness" not in plan.names)
    return [chart for plan in plans if (chart := _chart(plan, log))["series"]]


def logged_charts(*logs: MetricsLog) -> list[ChartPlan]:
    """Return a chart for each metric that a reward function of any of these runs gave to log_metric."""
    return [ChartPlan((name,), title=name.removeprefix(LOGGED)) for name in _beginning_with(LOGGED, *logs)]


def _beginning_with(prefix: str, *logs: MetricsLog) -> tuple[str, ...]:
    """Return the metrics of any step with this prefix, in the order of their trailing numbers or names."""
    found = {name for log in logs for line in log.steps for name in line.values if name.startswith(prefix)}
    return tuple(sorted(found, key=lambda name: (not name[len(prefix) :].isdecimal(), len(name), name)))


def _chart(plan: ChartPlan, log: MetricsLog) -> dict[str, Any]:
    series = [series for name in plan.names if (series := series_of(name, plan.band, log)) is not None]
    chart = {**chart_of(plan), "series": series}
    # The range is the first line's. A line without a range would look unhealthy outside it, wrongly.
    chart["flat"] = not plan.wide and all(_is_flat(one["y"], least=plan.least) for one in series)
    measure, others = describe(plan.names[0]), [one for one in series if describe(one["name"]).healthy is None]
    if any(y is not None and not measure.is_usual(y) for one in others for y in one["y"]):
        chart["healthy"] = None
    return chart


def _is_flat(values: Sequence[float | None], *, least: float) -> bool:
    """Return True if a line shows no more than its last value.

    It varies by a thousandth of itself, or by a twentieth of ``least``, the smallest range that its axis covers.
    """
    known = [value for value in values if value is not None]
    if len(known) < _FLAT_STEPS:
        return False
    return max(known) - min(known) <= max(_FLAT * max(map(abs, known)), least / 20)


def chart_of(plan: ChartPlan) -> dict[str, Any]:
    """Return a chart's description without its series."""
    metric = describe(plan.names[0])
    return {
        "id": metric.name,
        "title": plan.title or metric.title,
        "unit": metric.unit,
        "explanation": metric.explanation,
        "healthy": None if metric.healthy is None or not metric.judged else list(metric.healthy),
        **{name: getattr(plan, name) for name in ("wide", "log", "exact", "floor", "ceiling", "least")},
    }


def series_of(name: str, band: str, log: MetricsLog) -> dict[str, Any] | None:
    """Return a line of a chart, reduced in size; ``None`` if a run has no such value."""
    points = _points(name, log)
    if not points:
        return None
    chosen = downsample([y for _, y in points], limit=MAX_POINTS)
    series: dict[str, Any] = {
        "name": name,
        "label": LABELS.get(name) or describe(name).title.removeprefix("Reward "),
        "x": [points[index][0] for index in chosen],
        "y": [_rounded(points[index][1]) for index in chosen],
    }
    if band:
        widths = {line.step: line.values[band] for line in log.steps if band in line.values}
        series["band"] = [_rounded(widths.get(step, math.nan)) for step in series["x"]]
    return series


def _points(name: str, log: MetricsLog) -> list[tuple[int, float]]:
    if name.startswith("evaluation/"):
        field = name.removeprefix("evaluation/")
        return [(result.step, getattr(result, field)) for result in log.evaluations]
    return [(line.step, line.values[name]) for line in log.steps if name in line.values]


def downsample(values: Sequence[float], *, limit: int) -> list[int]:
    """Return indices of at most ``limit`` values: the ends, and the lowest and highest of each stretch."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    buckets = (limit - 2) // 2
    chosen = {0, count - 1}
    for bucket in range(buckets):
        stretch = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        known = [index for index in stretch if math.isfinite(values[index])]
        if known:
            chosen |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
    return sorted(chosen)


def timing(steps: Sequence[StepLine]) -> dict[str, Any] | None:
    """Return seconds per step by part, averaged over stretches of steps; None if steps were not timed.

    The parts add up to the step: sampling beside training counts as far as the trainer waited for it.
    """
    timed = [line for line in steps if "step_time" in line.values]
    named = (*(WAITING if _sampled_elsewhere(timed) else SAMPLING), *TRAINING)
    parts = [(name, title) for name, title in named if any(name in line.values for line in timed)]
    if not timed or not parts:
        return None
    stretches = min(len(timed), MAX_BARS)
    edges = [index * len(timed) // stretches for index in range(stretches + 1)]
    rows = [timed[a:b] for a, b in pairwise(edges)]
    columns = [(name, title, [_seconds(row, name) for row in rows]) for name, title in parts]
    whole = [_mean(row, "step_time") for row in rows]
    rest = [max(0.0, total - sum(column[index] for *_, column in columns)) for index, total in enumerate(whole)]
    columns.append(("other", "Other", rest))
    return {
        "x": [row[-1].step for row in rows],
        "parts": [
            {"name": name, "label": title, "y": [_rounded(value) for value in column]}
            for name, title, column in columns
        ],
        "mean": _rounded(_mean(timed, "step_time")),
    }


def _sampled_elsewhere(timed: Sequence[StepLine]) -> bool:
    """Return True if sampling was not part of the trainer's wait, or longer than it."""
    sampling = sum(_seconds(timed, name) for name, _ in SAMPLING)
    waited = any("data_fetch_time" in line.values for line in timed)
    return waited and not 0 < sampling <= _mean(timed, "data_fetch_time")


def _seconds(lines: Sequence[StepLine], name: str) -> float:
    """Return the mean seconds of a part; for rewards, of the seconds in which nothing was generated."""
    return _mean(lines, name) - (_mean(lines, "hidden_reward_time") if name == "reward_time" else 0.0)


def _mean(lines: Sequence[StepLine], name: str) -> float:
    values = [value for line in lines if math.isfinite(value := line.values.get(name, 0.0))]
    return sum(values) / len(values) if values else 0.0


def _rounded(value: float) -> float | None:
    """Round to the five digits that a chart can show, and turn NaN, which JSON lacks, into None."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
