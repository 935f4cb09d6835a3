"""Static pages of several runs, for any web server: an index, each run's report, and a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lachesis.common.files import write_atomic
from lachesis.plugins.report import data as report_data
from lachesis.plugins.report.compare import run_names, write_compare
from lachesis.plugins.report.page import TEMPLATE, render_report
from lachesis.web.pages import render_page

INDEX = TEMPLATE.with_name("publish.html.j2")


def publish(run_dirs: Sequence[Path], directory: Path) -> Path:
    """Write the pages of runs into ``directory``, and return the path of its index.html.

    Pages of the same names are replaced; other files there stay.

    Raises:
        DataError: a run has no metrics.jsonl, or one of its files is malformed.
    """
    names = [name.replace("/", "-") for name in run_names(run_dirs)]
    for name, run_dir in zip(names, run_dirs, strict=True):
        _write(directory / f"{name}.html", render_report(run_dir))
    if len(run_dirs) > 1:
        write_compare(run_dirs, directory / "compare.html")
    rows = [_row(name, run_dir) for name, run_dir in zip(names, run_dirs, strict=True)]
    index = directory / "index.html"
    _write(index, render_page(INDEX, rows=rows, compared=len(rows) > 1))
    return index


def _row(name: str, run_dir: Path) -> dict[str, Any]:
    """Return a run's entry in the index."""
    run = report_data.read_run(run_dir)
    return {
        "name": name,
        "words": report_data.descriptors(run.config),
        "date": report_data.date_of(run.log.steps),
        "headline": report_data.headline(run.log),
        "facts": report_data.facts(run)[:2],
    }


def _write(path: Path, page: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode("utf-8", errors="replace"))
