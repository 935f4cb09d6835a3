"""Errors that Lachesis raises on purpose.

A message says what was wrong and where; ``remedy`` says what to do about it. The command line prints
both in one line and exits with ``exit_code``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# Control characters except tab and line feed, and characters that reorder the text around them.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""Return ``text`` with control characters written out, as in ``\x1b[2J``."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class LachesisError(Exception):
    """Root of all errors of this package.

    Args:
        message: what was wrong, and where.
        remedy: what the user can do about it, as an imperative sentence; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        # Both may quote a model's text, and may be printed by any code that catches the error.
        self.message, self.remedy = escape_controls(message), escape_controls(remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} -> {self.remedy}" if self.remedy else self.message


class ConfigError(LachesisError):
    """A configuration that cannot be run: unknown key, wrong type, impossible arithmetic."""

    exit_code = 2


class DataError(LachesisError):
    """A dataset or prompt that cannot be used: missing, empty, malformed, too long."""

    exit_code = 3


class RewardError(LachesisError):
    """A reward function that raised, hung, or returned something other than a list of rewards."""

    exit_code = 4


class ModelError(LachesisError):
    """A model or tokenizer that cannot be trained as asked."""

    exit_code = 5


class EngineError(LachesisError):
    """A failed generation, or an engine in a state in which it cannot serve."""

    exit_code = 6


class EngineUnreachable(EngineError):
    """A server that does not answer, or says that its engine is dead: it is not up yet, or gone."""


class EngineLost(EngineError):
    """A dead engine that took along the weights it shared with the trainer: only a checkpoint has them."""


class StaleWeights(EngineError):
    """Engine weights that differ from the trainer's: a transfer did not arrive, or only in part."""

    exit_code = 7


class DeadlineExceeded(LachesisError):
    """A named wait took longer than the configuration allows."""

    exit_code = 8


class CheckpointError(LachesisError):
    """A checkpoint that could not be written or read back."""

    exit_code = 9


class RunRemoved(CheckpointError):
    """A run directory that was removed, in full or in part, while the run was writing to it."""


class TrainingError(LachesisError):
    """An optimizer step that must not be applied, such as one with a non-finite gradient."""

    exit_code = 10


class StopRequested(LachesisError):
    """A stop request during a wait, which is not a failure: the loop saves its state and ends."""


class DependencyError(LachesisError):
    """An optional dependency that the configuration needs and that is not installed."""

    exit_code = 11


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if the text is empty."""
    return escape_controls((str(error).strip().splitlines() or [type(error).__name__])[0])


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to ``word``, for "did you mean"; None if none is similar."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str, cutoff: float = 0.5) -> str:
    """Return a remedy that names the known name most similar to ``word``, ``otherwise`` if none is similar."""
    near = nearest(word, known, cutoff=cutoff)
    return f"did you mean {near}?" if near else otherwise
