"""Commands with the Atropos trainer's flags: ``grpo`` trains, ``run`` starts everything that a run needs as well."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from lachesis.cli.base import (
    ALL_WORDS,
    HELP_FLAGS,
    Overrides,
    Overwrite,
    Resume,
    Ui,
    app,
    conclude,
    console,
    hide_progress_bars,
    live_page,
    printed_log,
    stop_on_signals,
    world_of_leader,
)
from lachesis.common.run_files import run_paths
from lachesis.common.world import World
from lachesis.config.load import LoadedConfig, load_argv
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.plugins.dialects.atropos_help import RUN_HELP, help_text

if TYPE_CHECKING:
    from lachesis.run.context import Companions

# Lines that Atropos's documents show during training; logged by the bridges, the engine's client and the source.
DOCUMENTED = ("[", "Exported ", "Attached ")

Benchmark = Annotated[bool, typer.Option("--benchmark", help="Print the times of all steps at the end.")]


@app.command(context_settings=ALL_WORDS)
def grpo(
    context: typer.Context,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    benchmark: Benchmark = False,
    ui: Ui = False,
) -> None:
    """Train with the Atropos trainer's flags; --help lists them."""
    if HELP_FLAGS & set(context.args):
        return console.print(help_text())
    world = world_of_leader()
    loaded = load_argv(context.args, overrides=overrides or [])
    from lachesis.plugins.atropos.services import require_server

    require_server(loaded.config)
    _train(context, loaded, world, resume=resume, overwrite=overwrite, benchmark=benchmark, ui=ui)


@app.command("run", context_settings=ALL_WORDS)
def run_everything(
    context: typer.Context,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    benchmark: Benchmark = False,
    ui: Ui = False,
    engine: Annotated[str, typer.Option(help="Engine of the run.")] = "vllm",
    environment: Annotated[str | None, typer.Option(help="The environment to start.")] = None,
    environment_args: Annotated[str, typer.Option(help="Flags of the environment.")] = "",
    api_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the rollout API to start.")] = None,
) -> None:
    """Start rollout API, engine, environment and trainer, as a configuration or flags say, and stop them."""
    if HELP_FLAGS & set(context.args) or not (context.args or environment):
        from lachesis.plugins.atropos.environments.shipped import SHIPPED

        return console.print(RUN_HELP.format(names=", ".join(SHIPPED)))
    world = world_of_leader()
    from lachesis.plugins.atropos.services import Services, load_words

    loaded = load_words(
        context.args,
        overrides=overrides or [],
        engine=engine,
        environment=environment,
        environment_args=environment_args,
        api_port=api_port,
    )
    companions = Services(loaded.config)
    options = {"resume": resume, "overwrite": overwrite, "benchmark": benchmark, "ui": ui}
    _train(context, loaded, world, **options, companions=companions)


def _train(
    context: typer.Context,
    loaded: LoadedConfig,
    world: World | None,
    *,
    resume: bool,
    overwrite: bool,
    benchmark: bool,
    ui: bool,
    companions: Companions | None = None,
) -> None:
    """Train, print the documented lines meanwhile, and then the benchmark's if requested."""
    from lachesis.run.context import RunContext
    from lachesis.run.start import start_run

    with stop_on_signals() as stop, live_page(loaded, asked=ui), printed_log("lachesis", beginning=DOCUMENTED):
        surroundings = RunContext(
            console=console, stop_requested=lambda: bool(stop), companions=companions, world=world
        )
        summary = start_run(loaded, surroundings, resume=resume, overwrite=overwrite, imported=hide_progress_bars)
    if benchmark:
        console.print(benchmark_lines(summary.run_dir, mode=loaded.config.bridge.kind))
    conclude(summary, stop, command_of(context))


def command_of(context: typer.Context) -> list[str]:
    """Return the command line, without options that apply only to the first start."""
    words = ["lachesis", str(context.info_name), *context.args]
    for option in context.command.params:
        value = context.params[str(option.name)]
        if value == option.default or option.name in ("resume", "overwrite"):
            continue
        flag = option.opts[0]
        words += (
            [flag] if value is True else [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
        )
    return words


def benchmark_lines(run_dir: Path, *, mode: str) -> str:
    """Return the lists that ``--benchmark`` prints at the end: times of steps, transfers and waits, and memory."""
    steps = [line.values for line in read_metrics(run_paths(run_dir)["metrics"]).steps]
    lines = [f"benchmark: {mode}, {len(steps)} steps"]
    for title, name, unit in (
        ("step_times", "step_time", "s"),
        ("sync_times", "sync_time", "s"),
        ("data_fetch_times", "data_fetch_time", "s"),
        ("gpu_memories", "gpu_memory_gb", "GB"),
    ):
        values = [step[name] for step in steps if name in step]
        if not values:
            lines.append(f"  {title}: none")
            continue
        total = f", total {sum(values):.2f} {unit}" if unit == "s" else ""
        lines.append(f"  {title}: mean {fmean(values):.3f} {unit}, max {max(values):.3f} {unit}{total}")
        lines.append(f"    [{', '.join(f'{value:.3f}' for value in values)}]")
    return "\n".join(lines)
