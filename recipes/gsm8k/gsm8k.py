"""GSM8K for the recipes of this folder: rows as conversations, and a reward for the right last number."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def problem(row):
    """Return a row of openai/gsm8k as a question, its answer, and the solution that a supervised start learns."""
    question = f"{row['question']}\nThink step by step, and end with the answer as a number."
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "answer": number(row["answer"]), "solution": row["answer"]}


def right(completions, answer, **columns) -> list[float]:
    """Return 1 for each completion whose last number is the answer, else 0."""
    return [float(number(one[0]["content"]) == wanted) for one, wanted in zip(completions, answer, strict=True)]


def number(text: str) -> str | None:
    """Return the last number of a text without commas and trailing zeros, or None if it has none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    last = found[-1].replace(",", "")
    return last.rstrip("0").rstrip(".") if "." in last else last
