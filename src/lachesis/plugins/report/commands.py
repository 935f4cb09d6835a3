"""Commands that read runs: ``report``, ``compare`` and ``watch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import app, console, shown
from lachesis.common.errors import DataError
from lachesis.common.run_files import run_paths


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    publish: Annotated[Path | None, typer.Option(help="Directory for static pages of all these runs.")] = None,
) -> None:
    """Rewrite report.html of runs, or write static pages of them with an index."""
    from lachesis.plugins.report.page import write_report
    from lachesis.plugins.report.publish import publish as publish_runs

    if publish is not None:
        console.print(f"{len(run_dirs)} run(s): {shown(publish_runs(run_dirs, publish))}")
        return
    for run_dir in run_dirs:
        console.print(f"report: {shown(write_report(run_dir))}")


@app.command()
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("compare.html"),
) -> None:
    """Write a page that compares runs side by side: curves, configurations, the same prompts."""
    from lachesis.plugins.report.compare import write_compare

    console.print(f"comparison: {shown(write_compare(run_dirs, out))}")


@app.command()
def watch(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 8010,
) -> None:
    """Show runs in the browser while they train. On another machine: ssh -L 8010:127.0.0.1:8010 HOST."""
    from lachesis.plugins.report.watch_server import listen, serve

    for path in run_dirs:
        if not run_paths(path)["state"].exists() and not run_paths(path)["metrics"].exists():
            raise DataError(f"{path} has no run", remedy="give the directories of runs, such as runs/NAME")
    place = listen(port)
    console.print(place.words)
    serve(run_dirs, place.listener, place.token)
