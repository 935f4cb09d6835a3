"""The command ``status``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lachesis.cli.base import app, console


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is known, as JSON.")] = False,
) -> None:
    """Print a run's state and its current wait. Exit code 1 if it ended unfinished or was suspended."""
    from lachesis.run.status import read_status, status_json, status_lines

    found = read_status(run_dir)
    if as_json:
        console.print(status_json(found))
    else:
        for title, text in status_lines(found):
            console.print(Text.assemble((f"{title:<11}", "bold"), text))
    if not found.goes_on and found.state != "finished":
        raise typer.Exit(1)
