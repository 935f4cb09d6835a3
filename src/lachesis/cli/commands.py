"""Commands of ``commands.toml``, by panel of `lachesis --help`; the help imports none of their modules."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click
from typer.core import TyperGroup


@dataclass(frozen=True, slots=True)
class Command:
    """A command that ``module`` defines; ``summary`` is its line in `lachesis --help`."""

    module: str
    summary: str


PANELS: Mapping[str, Mapping[str, Command]] = {
    panel: {name: Command(**row) for name, row in rows.items()}
    for panel, rows in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
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
                formatter.write_dl(
                    [
                        (name.ljust(width), f"Of {point.dist.name if point.dist else point.module}.")
                        for name, point in more.items()
                    ]
                )


def installed() -> dict[str, EntryPoint]:
    """Return the commands of installed packages by name; a name of :data:`COMMANDS` stays this package's."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in COMMANDS}


def load(words: Sequence[str] | None = None) -> None:
    """Import the module of the command that ``words`` name, or all modules if they name none, to suggest near ones."""
    first = next((word for word in words or () if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS and first in (more := installed()):
        importlib.import_module(more[first].module)
        return
    named = COMMANDS if words is None else [word for word in words if not word.startswith("-")][:1]
    for name in named if all(name in COMMANDS for name in named) else COMMANDS:
        importlib.import_module(f"lachesis.{COMMANDS[name].module}")
