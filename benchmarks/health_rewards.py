"""Rewards of the runs that `health.py` records: sound ones, and those that make a run sick."""

from __future__ import annotations

import difflib
import re
from typing import Any

_NUMBER = re.compile(r"\d+")
_ONE_SENTENCE = "The answer is 12."


def right(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Return 1 where the last number of the completion is the answer, else 0."""
    return [float(_last_number(_text(one)) == wanted) for one, wanted in zip(completions, answer, strict=True)]


def right_in_points(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Return 50 for right and -50 for wrong completions."""
    return [100.0 * value - 50.0 for value in right(completions, answer)]


def right_or_costs(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Return 0 for right and -1 for wrong completions."""
    return [value - 1.0 for value in right(completions, answer)]


def one_sentence(completions: Any, **columns: Any) -> list[float]:
    """Return 1 where the completion is one sentence that ends with a full stop, less for each sign besides."""
    return [
        1.0 / (1 + abs(text.count(".") - 1) + text.count("\n") + (not text.endswith(".")))
        for text in _each(completions)
    ]


def nothing(completions: Any, **columns: Any) -> list[float]:
    """Return 0, whatever is said."""
    return [0.0 for _ in completions]


def of_the_prompt(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Return a value of the problem and not of the completion."""
    return [int(wanted) % 7 / 7 for wanted in answer]


def one_text(completions: Any, **columns: Any) -> list[float]:
    """Return how close a completion is to one sentence, whatever was asked."""
    return [difflib.SequenceMatcher(None, text, _ONE_SENTENCE).ratio() for text in _each(completions)]


def right_and_long(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Return 0.2 for right completions, and 0.01 for each character of any."""
    sums = right(completions, answer)
    return [0.2 * value + 0.01 * len(text) for value, text in zip(sums, _each(completions), strict=True)]


def short(completions: Any, **columns: Any) -> list[float]:
    """Return more for completions of fewer words, the most for none at all."""
    return [1.0 / (1 + len(text.split())) for text in _each(completions)]


def fails_often(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Raise for every other problem."""
    if int(answer[0]) % 2:
        raise ValueError("no reward for odd answers")
    return right(completions, answer)


def _each(completions: Any) -> list[str]:
    return [_text(one) for one in completions]


def _text(completion: Any) -> str:
    return completion[0]["content"]


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return str(int(found[-1])) if found else None
