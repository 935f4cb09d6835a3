"""Comparison of runs: shared charts of curves, the differences of their configurations, and the same prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError
from lachesis.common.files import write_atomic
from lachesis.common.json_values import flat
from lachesis.common.run_files import run_paths
from lachesis.metrics.sinks.tape import read_lines, tape_files
from lachesis.plugins.report.charts import CHARTS, ChartPlan, chart_of, logged_charts, series_of
from lachesis.plugins.report.data import Run, read_run
from lachesis.web.pages import render_page

TEMPLATE = Path(__file__).parent / "templates" / "compare.html.j2"
BODY = TEMPLATE.with_name("compare_body.html.j2")
# Runs whose configurations differ only in these keys are seeds of one experiment.
SEED_KEYS = ("run.seed", "run.name", "run.dir")
MAX_PROMPTS, MAX_CHARACTERS, MAX_STEPS_BACK, GROUPS_A_STEP = 8, 600, 40, 64


def write_compare(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write a page, one file that loads nothing, and return its path.

    Raises:
        DataError: fewer than two runs, or one of them cannot be read.
    """
    values = compare_values(run_dirs)
    write_atomic(path, render_page(TEMPLATE, **values).encode("utf-8", errors="replace"))
    return path


def render_body(run_dirs: Sequence[Path]) -> tuple[str, dict[str, Any]]:
    """Return the page's HTML without the frame, and the data for its scripts. Raises as :func:`write_compare`."""
    values = compare_values(run_dirs)
    return render_page(BODY, **values), values["data"]


def compare_values(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return the values of the template."""
    if len(run_dirs) < 2:
        raise DataError("a comparison needs two runs", remedy="give the directories of two runs or more")
    runs = [read_run(path) for path in run_dirs]
    names = run_names(run_dirs)
    groups = seed_groups(runs, names)
    return {
        "names": names,
        "groups": [(label, [names[index] for index in members]) for label, members in groups],
        "differences": differences(runs),
        "prompts": same_prompts(run_dirs),
        "data": {"charts": charts(runs, groups), "timing": None, "rollouts": []},
    }


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the directories' names, with their parents' names if they would be equal."""
    paths = [path.resolve() for path in run_dirs]
    short = [path.name for path in paths]
    return [str(Path(path.parent.name, path.name)) if short.count(path.name) > 1 else path.name for path in paths]


def seed_groups(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Group runs that differ only in their seed, in order: a label and the indices of its runs."""
    found: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        known = {key: value for key, value in flat(run.config) if key not in SEED_KEYS}
        found.setdefault(repr(sorted(known.items())) if known else str(index), []).append(index)
    return [
        (names[members[0]] if len(members) == 1 else f"{names[members[0]]} and {len(members) - 1} more", members)
        for members in found.values()
    ]


def charts(runs: Sequence[Run], groups: Sequence[tuple[str, list[int]]]) -> list[dict[str, Any]]:
    """Return the report's charts with the first metric of every run; seeds become a mean with its deviation as a band.

    Metrics that the runs' reward functions logged are included.
    """
    found: list[dict[str, Any]] = []
    for plan in (*CHARTS, *logged_charts(*(run.log for run in runs))):
        lines = [line for label, members in groups if (line := _line(plan, runs, members, label)) is not None]
        if lines:
            found.append({**chart_of(plan), "series": lines})
    return found


def _line(plan: ChartPlan, runs: Sequence[Run], members: Sequence[int], label: str) -> dict[str, Any] | None:
    series = [one for index in members if (one := series_of(plan.names[0], "", runs[index].log)) is not None]
    if not series:
        return None
    if len(series) == 1:
        return {**series[0], "label": label}
    values = [dict(zip(one["x"], one["y"], strict=True)) for one in series]
    steps = sorted(set.intersection(*(set(known) for known in values)))
    columns = [[known[step] for known in values if known[step] is not None] for step in steps]
    return {
        "name": plan.names[0],
        "label": label,
        "x": steps,
        "y": [statistics.fmean(column) if column else None for column in columns],
        "band": [statistics.stdev(column) if len(column) > 1 else None for column in columns],
    }


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return each key that differs between configurations, with its value in each; "–" if a run lacks it."""
    known = [dict(flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in known for key in one)
    found = ((key, [one.get(key, "–") for one in known]) for key in keys)
    rows = [(key, [one if isinstance(one, str) else repr(one) for one in values]) for key, values in found]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def same_prompts(run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return recent prompts of all runs, with the mean reward and best completion of each run's latest group."""
    latest = [_latest_by_prompt(path) for path in run_dirs]
    shared = [text for text in latest[0] if all(text in one for one in latest[1:])]
    return [
        {"prompt": text[:MAX_CHARACTERS], "answers": [one[text] for one in latest]} for text in shared[:MAX_PROMPTS]
    ]


def _latest_by_prompt(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return step, mean reward and best completion of the last group for each prompt text."""
    found: dict[str, dict[str, Any]] = {}
    files = tape_files(run_paths(Path(run_dir))["rollouts"])
    for step in islice(reversed(files), MAX_STEPS_BACK):
        for line in read_lines(files[step], limit=GROUPS_A_STEP):
            known = [sample for sample in line["samples"] if sample["reward"] is not None]
            if known and line["prompt"]["text"] not in found:
                best = max(known, key=lambda sample: sample["reward"])
                mean = statistics.fmean(sample["reward"] for sample in known)
                found[line["prompt"]["text"]] = {
                    "step": step,
                    "reward": f"{mean:.3g}" if math.isfinite(mean) else "–",
                    "best": best["text"][:MAX_CHARACTERS],
                }
    return found
