"""The commands ``explain`` and ``translate``, for keys of ours and of other trainers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lachesis.cli.base import Overrides, app, console
from lachesis.common import errors
from lachesis.common.errors import LachesisError
from lachesis.plugins.dialects.explain import Explanation, explain
from lachesis.plugins.dialects.foreign_files import keys_in, translated
from lachesis.plugins.dialects.words import read_table


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


def exit_codes() -> dict[int, str]:
    """Return the meaning of each exit code, in ascending order."""
    found: dict[int, list[str]] = {int(code): [words] for code, words in read_table("exit_codes")["others"].items()}
    for kind in vars(errors).values():
        # A class that only inherits its code is listed with the class that defines it.
        own = isinstance(kind, type) and issubclass(kind, LachesisError) and "exit_code" in vars(kind)
        if own and kind is not LachesisError:
            found.setdefault(kind.exit_code, []).append(f"{kind.__name__}: {summary(kind)}")
    return {code: " ".join(found[code]) for code in sorted(found)}


def summary(thing: object) -> str:
    """Return the first paragraph of the docstring of ``thing``, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def meaning(word: str) -> Iterator[str]:
    """Yield lines about an exit code or a health rule; none if ``word`` is neither."""
    if word.isdecimal() and (words := exit_codes().get(int(word))) is not None:
        yield f"exit code {int(word)}"
        yield f"    {words}"
        yield f"    more: docs/errors/exit-code-{int(word)}.md"
        return
    from lachesis.metrics.health.monitor import RULES

    if word in RULES:
        yield f"{word}: a health rule"
        yield f"    {summary(RULES[word])}"
        yield f"    its messages and remedies: docs/metrics.md#{word}"
