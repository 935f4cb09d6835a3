"""Comparison of mathematical answers by math-verify, in bounded time."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lachesis.common.imports import optional_package
from lachesis.rollouts.tagged_text import longest_boxed

# Characters of an answer: those of datasets have some dozens.
_LONGEST_EXPRESSION = 1000
# Seconds that all answers of a call that are slow to compare get together, and the most and the least that one gets.
_SLOW_S, _SLOWEST_S, _LEAST_S = 20.0, 5.0, 0.05


def same_answers(texts: Iterable[str], golds: Sequence[str]) -> list[float | None]:
    """Compare answers with solutions in bounded time: the more slow ones have taken, the less the next one gets."""
    verdicts: list[float | None] = []
    left_s = _SLOW_S
    for text, gold in zip(texts, golds, strict=True):
        limit_s = max(_LEAST_S, min(_SLOWEST_S, left_s / 4))
        started = time.monotonic()
        verdicts.append(same_answer(text, gold, limit_s))
        if (took_s := time.monotonic() - started) >= limit_s:
            left_s -= took_s
    return verdicts


def same_answer(text: str, gold: str, limit_s: float = _SLOWEST_S) -> float | None:
    """Compare by math-verify in at most ``limit_s`` seconds, which needs a main thread (see ``needs_main_thread``).

    Its time grows faster than an expression, from seconds at some thousand characters on: a longer answer is wrong, and
    without a boxed one, the answer is looked for at the end.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it logs answers as they are, control characters too
    why = "answers are compared with math-verify, which is not installed"
    verifier: Any = optional_package("math_verify", why, remedy="pip install math-verify")
    wanted = verifier.parse(gold.rpartition("####")[2])  # GSM8K's answers end so, after their calculation
    if not wanted:
        return None
    boxed = longest_boxed(text)
    if boxed is not None and boxed > _LONGEST_EXPRESSION:
        return 0.0
    if boxed is None and len(text) > 2 * _LONGEST_EXPRESSION:
        end = text[-2 * _LONGEST_EXPRESSION :]
        text = end.partition("\n")[2] or end
    latex = verifier.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    try:
        with _limited(limit_s):
            found = verifier.parse(text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None)
            return float(verifier.verify(wanted, found, timeout_seconds=None))
    except _TooSlow:
        return 0.0


class _TooSlow(BaseException):
    """Exception that ends a slow comparison; math-verify and SymPy catch those that derive from Exception."""


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise _TooSlow in this process's main thread after ``limit_s``."""

    def stop(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
