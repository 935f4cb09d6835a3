"""One line of an answer of `lachesis doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lachesis.common.errors import LachesisError
from lachesis.process.managed import names_an_error


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    ``applies`` is False if there was nothing to try: the message says why.
    """

    subject: str
    message: str
    failed: bool = False
    applies: bool = True


def attempted(subject: str, trial: Callable[[], Check]) -> Check:
    """Return the result of a trial, or its error as a failed check: no error keeps other checks from being tried."""
    try:
        return trial()
    except LachesisError as error:
        return failure(subject, error)


def failure(subject: str, error: LachesisError) -> Check:
    """Return an error as a failed check in one line: its message, the first error of a log in it, and the last line."""
    first, *rest = str(error).splitlines()
    cause = next(filter(names_an_error, rest[:-1]), None)
    words = [first, *([] if cause is None else [cause]), *rest[-1:]]
    return Check(subject, " … ".join(word.lstrip(" |") for word in words), failed=True)
