"""The reward of the example: whether the answer names the right sum, however it is worded."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")


def right_sum(completions, answer, **columns) -> list[float]:
    """Return 1 for each completion whose last number is the answer, else 0.

    "7 + 5 = 12" and "The answer is 12." both count for 12; "12 + 5 is 17" does not.
    """
    return [float(last_number(one[0]["content"]) == right) for one, right in zip(completions, answer, strict=True)]


def last_number(text: str) -> str | None:
    """Return the last whole number of a text, without leading zeros, or None if it has none."""
    found = _NUMBER.findall(text)
    return str(int(found[-1])) if found else None
