"""The commands ``explain`` and ``translate``, for keys of ours and of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import Overrides, app, console
from lachesis.plugins.dialects.codes import meaning
from lachesis.plugins.dialects.explain import Explanation, explain
from lachesis.plugins.dialects.foreign_files import keys_in, translated


@app.command("explain", context_settings={"ignore_unknown_options": True})
def explain_command(
    key: Annotated[str, typer.Argument(help="Our key or another trainer's, a file, an exit code, or a health rule.")],
) -> None:
    """Explain a configuration key, or each key of a file: meaning, type, default, and names in other trainers."""
    if lines := list(keys_in(Path(key)) if Path(key).is_file() else meaning(key)):
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)
        return
    answer = explain(key)
    if answer.description:
        console.print(f"{answer.explanations[0].section}: {answer.description}\n")
    for found in answer.explanations:
        console.print(_headline(found), style="bold")
        console.print(f"    {found.description}")
        for alias in found.aliases if found.path and answer.meaning != "section" else ():
            default = "" if alias.default is None else f", default there {alias.default}"
            note = f" ({alias.note})" if alias.note else ""
            console.print(f"    {alias.dialect}: {alias.name}{default}{note}", style="dim")


def _headline(found: Explanation) -> str:
    if not found.path:
        return f"{found.aliases[0].name}: a name of {found.dialect}'s that sets nothing here"
    default = "required" if found.default is None else f"default {found.default}"
    kinds = f" (only with kind {' or '.join(found.kinds)})" if found.kinds else ""
    return f"{found.path}: {found.type}, {default}{kinds}"


@app.command("translate")
def translate_command(
    file: Annotated[Path, typer.Argument(help="A file for Axolotl, TRL, verl or OpenRLHF, or a script.")],
    overrides: Overrides = None,
) -> None:
    """Print another trainer's configuration in our keys."""
    console.out(translated(file, overrides=overrides or []), end="")
