"""Commands by panel of `lachesis --help`, each with the module that defines it; the help imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

import click
from typer.core import TyperGroup


@dataclass(frozen=True, slots=True)
class Command:
    """A command that ``module`` defines; ``summary`` is its line in `lachesis --help`."""

    module: str
    summary: str


PANELS: Mapping[str, Mapping[str, Command]] = {
    "Start": {
        "init": Command("cli.training", "Write a small example to run: configuration, reward, model, problems."),
        "doctor": Command("plugins.checks.commands", "Check the installation, and prove that training learns."),
        "plan": Command(
            "plugins.planning.commands", "Predict a run's steps and memory; --fit finds settings that fit."
        ),
        "explain": Command("plugins.dialects.commands.keys", "Explain a key or flag, ours or another trainer's."),
    },
    "Train": {
        "train": Command("cli.training", "Train from a file in Lachesis', Axolotl's or TRL's keys."),
        "run": Command("plugins.atropos.commands.grpo", "Start API, engine, environment and trainer, and stop them."),
        "sweep": Command("plugins.sweep.commands", "Train with several values of keys, in turn, and compare the runs."),
        "grpo": Command("plugins.atropos.commands.grpo", "Train with the Atropos trainer's flags."),
        "cluster": Command("plugins.cluster.commands", "Start a run on several nodes: cluster slurm, preflight."),
    },
    "Look": {
        "status": Command("cli.inspection", "Show the state of a run, and its current wait."),
        "watch": Command("plugins.report.commands", "Show current and finished runs on a live page."),
        "report": Command("plugins.report.commands", "Write report.html again, or static pages of several runs."),
        "eval": Command("plugins.benchmarks.commands", "Evaluate a model on benchmarks, or compare two."),
        "compare": Command("plugins.report.commands", "Write a page that shows runs side by side."),
        "rollouts": Command("plugins.report.rollout_commands", "Search a run's rollouts, or read one by turns."),
    },
    "Serve": {
        "serve": Command("plugins.serving.commands", "Serve a model whose weights trainers can change."),
        "vllm-serve": Command("plugins.serving.commands", "Serve the model of a configuration."),
        "run-api": Command("plugins.atropos.commands.api", "Serve the rollout API of Atropos' environments."),
        "tinker-server": Command("plugins.tinker.commands", "Serve a model that clients of Tinker train and sample."),
        "env": Command("plugins.atropos.commands.environments", "Serve, process or evaluate an environment."),
    },
    "More": {
        "export": Command("plugins.export.commands", "Write a checkpoint as a model or an adapter."),
        "push": Command(
            "plugins.export.commands", "Upload a run's model to the Hugging Face hub, with a card of its figures."
        ),
        "data": Command("plugins.checks.commands", "Find mistakes in a dataset: data check."),
        "rewards": Command(
            "plugins.checks.commands", "Try reward functions on right and wrong answers: rewards check."
        ),
        "translate": Command("plugins.dialects.commands.keys", "Print another trainer's file in our keys."),
        "scripts": Command(
            "plugins.dialects.commands.scripts", "Write scripts under the names of other trainers' commands."
        ),
    },
}
COMMANDS: Mapping[str, Command] = {name: command for panel in PANELS.values() for name, command in panel.items()}


# Entry points of installed packages: the name of a command, and the module that defines it for `lachesis.cli.base.app`.
GROUP = "lachesis.commands"


class Commands(TyperGroup):
    """The group of all commands, in the order of the table; those of installed packages are its last panel."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *installed()]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, panel in PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), command.summary) for name, command in panel.items()])
        if more := installed():
            with formatter.section("Installed"):
                formatter.write_dl([(name.ljust(width), f"Of {_package(point)}.") for name, point in more.items()])


def installed() -> dict[str, EntryPoint]:
    """Return the commands of installed packages by name; a name of :data:`COMMANDS` stays this package's."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in COMMANDS}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def load(words: Sequence[str] | None = None) -> None:
    """Import the module of the command that ``words`` name, or all modules if they name none, to suggest near ones."""
    first = next((word for word in words or () if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS and first in (more := installed()):
        importlib.import_module(more[first].module)
        return
    named = COMMANDS if words is None else [word for word in words if not word.startswith("-")][:1]
    for name in named if all(name in COMMANDS for name in named) else COMMANDS:
        importlib.import_module(f"lachesis.{COMMANDS[name].module}")
