"""Commands around environments: serving one, and training on what they push."""

from __future__ import annotations

import shlex
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from lachesis.cli.base import (
    EXIT_SIGNALLED,
    PASS_ON,
    app,
    console,
    hide_progress_bars,
    shown,
    stop_on_signals,
    world_of_leader,
)

if TYPE_CHECKING:
    from lachesis.run.train import RunSummary

# Every word is the command's own to read, --help too.
_ALL_WORDS = {**PASS_ON, "help_option_names": []}


@app.command(context_settings=_ALL_WORDS)
def env(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="arithmetic, gsm8k, calculator, FILE.py:CLASS or module.CLASS.")] = "",
    command: Annotated[str, typer.Argument(help="serve, process or evaluate.")] = "--help",
) -> None:
    """Serve, process or evaluate an environment; `lachesis env NAME --help` lists its flags."""
    from lachesis.run import environments as env_cli

    code = env_cli.run(name, command, context.args, say=console.print)
    if code:
        raise typer.Exit(code)


@app.command(context_settings=_ALL_WORDS)
def grpo(context: typer.Context) -> None:
    """Train with the Atropos trainer's flags; --help lists them."""
    from lachesis.run.grpo import grpo as train_with_flags

    hide_progress_bars()
    world = world_of_leader()
    with stop_on_signals() as stop:
        summary = train_with_flags(
            context.args, say=console.print, console=console, stop_requested=lambda: bool(stop), world=world
        )
    _conclude(summary, stop, "grpo", context.args)


@app.command("run", context_settings=_ALL_WORDS)
def run_everything(context: typer.Context) -> None:
    """Start rollout API, engine, environment and trainer, as a configuration or flags say, and stop them."""
    from lachesis.run.services import run_all

    hide_progress_bars()
    world = world_of_leader()
    with stop_on_signals() as stop:
        summary = run_all(
            context.args, say=console.print, console=console, stop_requested=lambda: bool(stop), world=world
        )
    _conclude(summary, stop, "run", context.args)


def _conclude(summary: RunSummary | None, stop: list[int], name: str, words: list[str]) -> None:
    """The last line; none where only help was asked for."""
    if summary is None:
        return
    if not summary.finished:
        command = shlex.join(["lachesis", name, *(word for word in words if word not in ("--overwrite", "--resume"))])
        said = signal.Signals(stop[0]).name
        console.print(f"stopped by {said} after step {summary.steps}; go on with: {command} --resume")
        raise typer.Exit(EXIT_SIGNALLED + stop[0])
    console.print(f"{summary.steps} steps in {summary.seconds:.0f} s; report: {shown(summary.report)}")
