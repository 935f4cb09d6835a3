"""Marked parts of a model's text, found in linear time: each function reads every character a fixed number of times.

A regular expression with two open ends, as ``<answer>(.*?)</answer>``, takes time that grows with the square of a text
that has many beginnings and no end, and holds the interpreter meanwhile; a model may write such texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Tool calls of Hermes and Qwen. A turn that ends early has no end of its call.
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BRACE = re.compile(r"\\boxed\{|[{}]")


def tagged(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield what stands between ``opening`` and the next ``closing``, from left to right, without overlaps."""
    at = 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:  # nor is there one after any later beginning
            return
        yield text[start:end]
        at = end + len(closing)


def after_in_order(text: str, marks: tuple[str, ...], at: int = 0) -> int:
    """Return the place after the last of ``marks`` that follow each other, anything between them; -1 if they do not."""
    for mark in marks:
        found = text.find(mark, at)
        if found < 0:
            return -1
        at = found + len(mark)
    return at


def has_line_end(text: str, end: str, at: int) -> bool:
    """Return True if ``end`` stands at the end of a line, from ``at`` on."""
    found = text.find(end, at)
    while found >= 0:
        after = found + len(end)
        if after == len(text) or text[after] == "\n":
            return True
        found = text.find(end, after)
    return False


def longest_boxed(text: str) -> int | None:
    r"""Return the length of the longest closed ``\boxed{...}``, nested braces included; None without one."""
    longest: int | None = None
    opened: list[int | None] = []  # where each brace that is open begins a box, if it does
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else None)
        elif opened and (start := opened.pop()) is not None:
            longest = max(longest or 0, brace.start() - start)
    return longest
