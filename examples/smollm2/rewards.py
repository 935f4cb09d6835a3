"""Rewards of the examples: the right sum, however it is worded, and the right equation without another word."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")


def right_sum(completions, answer, **columns) -> list[float]:
    """Return 1 for each completion whose last number is the answer, else 0.

    "7 + 5 = 12" and "The answer is 12." both count for 12; "12 + 5 is 17" does not.
    """
    return [float(last_number(one[0]["content"]) == right) for one, right in zip(completions, answer, strict=True)]


def bare_equation(prompts, completions, answer, **columns) -> list[float]:
    """Return 1 for the right equation and nothing else, 0.2 for a wrong one and nothing else, else 0."""
    rewards = []
    for prompt, completion, right in zip(prompts, completions, answer, strict=True):
        first, second = _NUMBER.findall(prompt[-1]["content"])
        found = re.fullmatch(rf"{first} \+ {second} = (\d+)", completion[0]["content"].strip())
        rewards.append(0.0 if found is None else 1.0 if found[1] == right else 0.2)
    return rewards


def last_number(text: str) -> str | None:
    """Return the last whole number of a text, without leading zeros, or None if it has none."""
    found = _NUMBER.findall(text)
    return str(int(found[-1])) if found else None
