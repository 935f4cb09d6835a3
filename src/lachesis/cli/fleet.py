"""The commands ``lachesis fleet add`` and ``lachesis fleet drain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import app, console
from lachesis.common.errors import ConfigError
from lachesis.common.run_files import run_paths

fleet_app = typer.Typer(help="Inference servers of a running run.", no_args_is_help=True)
app.add_typer(fleet_app, name="fleet")

Url = Annotated[str, typer.Argument(help="Address of the server, as http://HOST:PORT.")]
Run = Annotated[Path | None, typer.Option("--run", help="The run directory; if unset the running one in runs/.")]


@fleet_app.command()
def add(url: Url, run: Run = None) -> None:
    """Add a server to a run; it serves once the next transfer has brought it the weights, with proof."""
    from lachesis.run import fleet

    run_dir = run or _going_on()
    url = fleet.add(run_dir, url)
    console.print(f"{url} joins {run_dir} before its next transfer; `lachesis status {run_dir}` shows the engines")


@fleet_app.command()
def drain(url: Url, run: Run = None) -> None:
    """Remove a server: it gets no requests from the next transfer on, and is released once it has none."""
    from lachesis.run import fleet

    run_dir = run or _going_on()
    url = fleet.drain(run_dir, url)
    console.print(f"{url} leaves {run_dir} before its next transfer; stop it once its claim is given back")


def _going_on() -> Path:
    """Return the only unfinished run in ``runs``; raise ConfigError unless there is exactly one."""
    from lachesis.run.status import read_status

    found = [path for path in sorted(Path("runs").glob("*")) if run_paths(path)["state"].is_file()]
    going_on = [path for path in found if read_status(path).goes_on]
    if len(going_on) == 1:
        return going_on[0]
    what = (
        f"{len(going_on)} runs are running ({', '.join(map(str, going_on))})"
        if going_on
        else "no run in runs/ is running"
    )
    raise ConfigError(what, remedy="name the run with --run RUN_DIR")
