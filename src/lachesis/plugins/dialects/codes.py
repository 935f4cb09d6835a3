"""The meanings of exit codes and health rules, taken from the docstrings of errors and rules; no torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from lachesis.common import errors
from lachesis.common.errors import LachesisError
from lachesis.plugins.dialects.words import read_table


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
