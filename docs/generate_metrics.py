"""Writes metrics.md from the table of metrics and the health rules: ``python docs/generate_metrics.py``."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from lachesis.metrics.health.monitor import RULES
from lachesis.metrics.names import (
    BY_ENVIRONMENT,
    BY_SOURCE,
    GENERATION_OF,
    PREFIX_HITS_OF,
    RECEIVING_OF,
    SENDING_OF,
    SENT_BY,
    TRAINING_OF,
)
from lachesis.plugins.report.metric_descriptions import METRICS, Metric, describe

TARGET = Path(__file__).with_name("metrics.md")

INTRODUCTION = """\
# Metrics and health

<!-- Written by docs/generate_metrics.py from src/lachesis/plugins/report/metrics.toml and health/; do not edit. -->

Each step is a line of `metrics.jsonl` in the run directory, and goes to every sink that is on. A metric that was not
measured is left out: a missing number is not 0. Seconds of a checkpoint count with the step after it.

metric | unit | healthy | what it says
---|---|---|---
"""

# Names that end in what they are of.
FAMILIES = (
    "rewards/NAME/mean",
    "rewards/NAME/std",
    f"{BY_ENVIRONMENT}NAME",
    f"{BY_SOURCE}NAME/reward",
    f"{GENERATION_OF}HOST:PORT",
    f"{PREFIX_HITS_OF}HOST:PORT",
    f"{TRAINING_OF}N",
    f"{RECEIVING_OF}HOST:PORT",
    f"{SENDING_OF}N",
    f"{SENT_BY}N",
)

HEALTH = """
## What the health rules look for

A finding says what is wrong and what to change. It is shown on the console, in the report and in `metrics.jsonl`, and
repeated when it gets worse, and after 20 steps if it is more than a note.
"""


def render() -> str:
    """The whole page."""
    families = (replace(describe(name), name=name) for name in FAMILIES)
    metrics = "".join(map(_metric_row, (*METRICS.values(), *families)))
    return INTRODUCTION + metrics + HEALTH + "".join(map(_rule_section, RULES))


def _rule_section(name: str) -> str:
    """Return the place of a rule: what it looks for."""
    return f"\n### {name}\n\n{' '.join((inspect.getdoc(RULES[name]) or '').split())}\n"


def _metric_row(metric: Metric) -> str:
    return f"`{metric.name}` | {metric.unit} | {_range(metric)} | {metric.explanation}\n"


def _range(metric: Metric) -> str:
    if metric.healthy is None:
        return ""
    return _bounds(*metric.healthy) + ("" if metric.judged else " (documented for GRPO; not judged)")


def _bounds(low: float | None, high: float | None) -> str:
    if low is None:
        return f"below {high:g}"
    return f"above {low:g}" if high is None else f"{low:g} to {high:g}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
