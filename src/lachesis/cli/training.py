"""Commands that train, and what comes before."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from lachesis.cli.base import (
    EXIT_SIGNALLED,
    Overrides,
    app,
    console,
    hide_progress_bars,
    nothing,
    shown,
    stop_on_signals,
    world_of_leader,
)
from lachesis.config.init import init as write_first_run
from lachesis.config.load import load_config
from lachesis.config.plan import plan, plan_lines
from lachesis.config.rules import check


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file with the configuration.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete a run of that name first.")] = False,
) -> None:
    """Train as a configuration says."""
    world = world_of_leader()
    loaded = load_config(config, overrides=overrides or [])
    with console.status("loading torch and the model") if console.is_terminal else nothing():
        from lachesis.run import train as run

        hide_progress_bars()
    with stop_on_signals() as stop:
        summary = run.train(
            loaded,
            resume=resume,
            overwrite=overwrite,
            console=console,
            stop_requested=lambda: bool(stop),
            world=world,
        )
    report = shown(summary.report)
    if not summary.finished:
        name = signal.Signals(stop[0]).name
        command = shlex.join(["lachesis", "train", str(config), *(f"--set={item}" for item in overrides or [])])
        console.print(f"stopped by {name} after step {summary.steps}; go on with: {command} --resume")
        raise typer.Exit(EXIT_SIGNALLED + stop[0])
    if not summary.evaluations:
        console.print(f"{summary.steps} steps in {summary.seconds:.0f} s; report: {report}")
        return
    first, last = summary.evaluations[0], summary.evaluations[-1]
    console.print(
        f"held-out accuracy {first.accuracy:.2f} -> {last.accuracy:.2f} "
        f"({last.problems} problems, {summary.steps} steps, {summary.seconds:.0f} s); report: {report}"
    )


@app.command("plan")
def plan_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the configuration.")],
    overrides: Overrides = None,
    device: Annotated[Literal["cuda", "cpu"] | None, typer.Option(help="Plan for it; what is here, if unset.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many train, as torchrun starts them.")] = 1,
) -> None:
    """Say what a run will do, and the memory and disk it takes, without loading anything."""
    loaded = load_config(config, overrides=overrides or [])
    for finding in [*loaded.findings, *check(loaded.config)]:
        console.print(f"{finding.level}: {finding.message}", style="dim" if finding.level == "note" else "yellow")
    for line in plan_lines(plan(loaded.config, device=device, devices=devices)):
        console.print(line)


@app.command("init")
def init_command(
    directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path("."),
) -> None:
    """Write a configuration, a reward, a small model and its problems, which run at once."""
    files = write_first_run(directory)
    console.print(f"wrote {', '.join(shown(path) for path in files)}")
    console.print(f"start it with: lachesis train {shlex.quote(shown(files[0]))}")
