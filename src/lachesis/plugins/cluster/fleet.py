"""The commands ``lachesis fleet add`` and ``lachesis fleet drain``, and what they ask of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import app, console
from lachesis.common.errors import ConfigError, DataError
from lachesis.common.files import write_atomic
from lachesis.common.http import server_url
from lachesis.common.run_files import run_paths
from lachesis.config.load import load_config
from lachesis.config.schema import HttpEngineConfig
from lachesis.engines.addresses import FleetChanges, addresses
from lachesis.run.fleet import CHANGES, changes, shares_memory

fleet_app = typer.Typer(help="Inference servers of a running run.", no_args_is_help=True)
app.add_typer(fleet_app, name="fleet")

Url = Annotated[str, typer.Argument(help="Address of the server, as http://HOST:PORT.")]
Run = Annotated[Path | None, typer.Option("--run", help="The run directory; if unset the running one in runs/.")]


@fleet_app.command("add")
def add_command(url: Url, run: Run = None) -> None:
    """Add a server to a run; it serves once the next transfer has brought it the weights, with proof."""
    run_dir = run or _going_on()
    url = add(run_dir, url)
    console.print(f"{url} joins {run_dir} before its next transfer; `lachesis status {run_dir}` shows the engines")


@fleet_app.command("drain")
def drain_command(url: Url, run: Run = None) -> None:
    """Remove a server: it gets no requests from the next transfer on, and is released once it has none."""
    run_dir = run or _going_on()
    url = drain(run_dir, url)
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


def add(run_dir: Path, url: str) -> str:
    """Ask a run to take a server into its fleet; the server's address. Raises ConfigError, DataError."""
    url = server_url(url)
    _of_changing_run(run_dir)
    _write(run_dir, changes(run_dir).with_added(url))
    return url


def drain(run_dir: Path, url: str) -> str:
    """Ask a run to part with a server once that has no requests; the server's address.

    Raises:
        ConfigError: the run's servers do not change, or this is none of them, or the last.
        DataError: there is no run.
    """
    url = server_url(url)
    config = _of_changing_run(run_dir)
    before = changes(run_dir)
    members = addresses(config.urls, before)
    if url not in members:
        raise ConfigError(f"{url} is not an engine of {run_dir}", remedy=f"its engines are {', '.join(members)}")
    if members == [url]:
        raise ConfigError(f"{url} is the only engine of {run_dir}", remedy="add another one first")
    _write(run_dir, before.with_drained(url))
    return url


def _write(run_dir: Path, asked: FleetChanges) -> None:
    write_atomic(run_paths(run_dir)["fleet"], CHANGES.dump_json(asked, indent=1).decode() + "\n")


def _of_changing_run(run_dir: Path) -> HttpEngineConfig:
    path = run_paths(run_dir)["config"]
    if not path.is_file():
        raise DataError(f"{run_dir} holds no run", remedy="give the directory of a run, such as runs/NAME")
    config = load_config(path).config
    engine = config.engine
    if not isinstance(engine, HttpEngineConfig):
        raise ConfigError(
            f"{run_dir} has engine.kind {engine.kind}: the run starts its engines itself, and none can join or leave",
            remedy="start servers with `lachesis serve` and name them in engine.urls, with engine.kind: http",
        )
    if shares_memory(config):
        raise ConfigError(
            f"{run_dir} trains on the memory of its one engine (bridge.kind {config.bridge.kind})",
            remedy="use a bridge that copies, such as broadcast or lora_only without share_base",
        )
    return engine
