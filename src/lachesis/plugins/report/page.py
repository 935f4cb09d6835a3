"""Page report.html, which shows a run.

It loads nothing else, so it opens from disk and can be passed on.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.common.types import StepRecord
from lachesis.metrics.health.monitor import RULES
from lachesis.metrics.hub import Sink
from lachesis.metrics.sinks.jsonl import StepLine
from lachesis.plugins.report import data as report_data
from lachesis.plugins.report import rollouts as report_rollouts
from lachesis.plugins.report.charts import charts, timing
from lachesis.plugins.report.data import read_run, result_sentence, run_seconds, setting
from lachesis.web.pages import render_page

TEMPLATE = Path(__file__).parent / "templates" / "report.html.j2"
BODY = TEMPLATE.with_name("report_body.html.j2")
GROUPS_A_STEP = 2


class ReportSink(Sink):
    """Sink that rewrites the report every ``every_steps`` steps and at the end of the run.

    It reads metrics.jsonl and the tape of ``run_dir``, so in a hub it comes after the sinks that write them.
    """

    def __init__(self, run_dir: Path, every_steps: int) -> None:
        self._run_dir = Path(run_dir)
        self._every = every_steps
        self._unwritten = False

    def write(self, record: StepRecord) -> None:
        self._unwritten = True
        if record.step % self._every == 0:
            self._rewrite()

    def close(self) -> None:
        if self._unwritten:
            self._rewrite()

    def _rewrite(self) -> None:
        write_report(self._run_dir)
        self._unwritten = False


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html from config.yaml, metrics.jsonl and the tape, and return its path.

    Long runs are reduced: to 2,000 points a chart, and 60 steps of rollouts.

    Raises:
        DataError: ``run_dir`` has no metrics.jsonl, or one of the files is malformed.
        OSError: the page cannot be written; an old one is then still there.
    """
    path = run_paths(Path(run_dir))["report"]
    # UTF-8 cannot encode a lone surrogate in a completion.
    write_atomic(path, render_report(Path(run_dir)).encode("utf-8", errors="replace"))
    return path


def render_report(run_dir: Path) -> str:
    """Return the whole page of a run. Raises DataError as :func:`write_report`."""
    return render_page(TEMPLATE, **report_values(run_dir))


def render_body(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Return the report's HTML without the frame, and the data for its scripts.

    Raises:
        DataError: as :func:`write_report`.
    """
    values = report_values(run_dir)
    return render_page(BODY, **values), values["data"]


def report_values(run_dir: Path) -> dict[str, Any]:
    """Return the values of the report's template.

    Raises DataError as :func:`write_report`.
    """
    run = read_run(run_dir)
    steps, evaluations = run.log.steps, run.log.evaluations
    groups = setting(run.config, "logging.report_groups", GROUPS_A_STEP)
    config_path = run_paths(run_dir)["config"]
    config = key_lines(config_path.read_text(encoding="utf-8")) if config_path.exists() else []
    keys = {key for _, key in config}
    findings = [
        finding | {"parts": key_parts(finding["message"], keys), "about": _about(finding["rule"])}
        for finding in report_data.findings(steps)
    ]
    return {
        "name": str(setting(run.config, "run.name", run_dir.resolve().name)),
        "words": report_data.descriptors(run.config),
        "date": report_data.date_of(steps),
        "headline": report_data.headline(run.log),
        "sentence": result_sentence(
            evaluations[0] if evaluations else None,
            evaluations[-1] if evaluations else None,
            steps=len(steps),
            seconds=run_seconds(steps),
        ),
        "facts": report_data.facts(run),
        "findings": findings,
        "unusual": report_data.unusual(steps),
        "config": config,
        "model": report_data.how_the_model_ran(run_dir),
        "held_out": report_rollouts.held_out(run_paths(run_dir)["evaluations"]),
        "data": {
            "charts": charts(run.log),
            "timing": timing(steps),
            "rollouts": _with_rewards(report_rollouts.rollouts(run_paths(run_dir)["rollouts"], groups=groups), steps),
        },
    }


def _about(rule: str) -> str:
    """Return a rule's description; for a custom rule its own one, or nothing."""
    known = RULES.get(rule)
    return "" if known is None else " ".join((inspect.getdoc(known) or "").split())


def _with_rewards(rollouts: list[dict[str, Any]], steps: Sequence[StepLine]) -> list[dict[str, Any]]:
    """Add the distribution of all its rewards to the rollouts of a step, if it was recorded."""
    spread = {line.step: asdict(line.rewards) for line in steps if line.rewards is not None}
    return [entry | {"rewards": spread.get(entry["step"])} for entry in rollouts]


_DOTTED = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)")


def key_lines(text: str) -> list[tuple[str, str]]:
    """Return each line of a YAML text, and the dotted key that begins in it, or ""."""
    keys: dict[int, str] = {}
    for line, key in _keys(yaml.compose(text, Loader=report_data.LOADER), ""):
        keys.setdefault(line, key)
    return [(line, keys.get(number, "")) for number, line in enumerate(text.splitlines())]


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[int, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield key.start_mark.line, name
        yield from _keys(value, f"{name}.")


def key_parts(sentence: str, keys: Collection[str]) -> list[tuple[str, str]]:
    """Split a sentence into parts: the text of each, and the key that it names, or ""."""
    parts = ((part, part if part in keys else "") for part in _DOTTED.split(sentence))
    return [(text, key) for text, key in parts if text]
