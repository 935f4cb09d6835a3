"""Commands that train, plan, export and publish runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import (
    Overrides,
    Overwrite,
    Resume,
    Ui,
    app,
    conclude,
    console,
    live_page,
    shown,
    stop_on_signals,
    world_of_leader,
)
from lachesis.common.chatter import hide_progress_bars
from lachesis.config.init import init as write_first_run
from lachesis.config.load import load_config
from lachesis.config.smoke import trial


@app.command("train")
def train_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the configuration.")],
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try it for two steps, in NAME-smoke, which is replaced each time.")
    ] = False,
    ui: Ui = False,
) -> None:
    """Train a model as a configuration says."""
    world = world_of_leader()
    loaded = load_config(config, overrides=overrides or [])
    if smoke:
        loaded, overwrite = trial(loaded), True
    from lachesis.run.context import RunContext
    from lachesis.run.start import start_run

    with stop_on_signals() as stop, live_page(loaded, asked=ui):
        context = RunContext(console=console, stop_requested=lambda: bool(stop), world=world)
        summary = start_run(loaded, context, resume=resume, overwrite=overwrite, imported=hide_progress_bars)
    words = [*(f"--set={item}" for item in overrides or []), *(["--smoke"] if smoke else []), *(["--ui"] if ui else [])]
    conclude(summary, stop, ["lachesis", "train", str(config), *words])


@app.command("init")
def init_command(
    directory: Annotated[Path, typer.Argument(help="Target directory; created if missing.")] = Path("."),
) -> None:
    """Write a first run that is ready to start: configuration, reward, small model and problems."""
    files = write_first_run(directory)
    console.print(f"wrote {', '.join(shown(path) for path in files)}")
    console.print(f"start it with: lachesis train {shlex.quote(shown(files[0]))}")
