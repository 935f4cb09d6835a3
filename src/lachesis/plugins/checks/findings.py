"""One line of an answer of `lachesis doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lachesis.common.errors import LachesisError
from lachesis.process.managed import names_an_error

# How far clocks may be apart: more than networks and schedulers delay an answer.
CLOCKS_S = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at and how it was.

    ``applies`` is False where there was nothing to try: the message says why.
    """

    subject: str
    message: str
    failed: bool = False
    applies: bool = True


def attempted(subject: str, trial: Callable[[], Check]) -> Check:
    """The check that a trial makes, or why it could not: no error of one keeps the others from being tried."""
    try:
        return trial()
    except LachesisError as error:
        return failure(subject, error)


def failure(subject: str, error: LachesisError) -> Check:
    """In one line: of a message with the end of a log in it, what it is, the first error in it and the last words."""
    first, *rest = str(error).splitlines()
    cause = next(filter(names_an_error, rest[:-1]), None)
    words = [first, *([] if cause is None else [cause]), *rest[-1:]]
    return Check(subject, " … ".join(word.lstrip(" |") for word in words), failed=True)
