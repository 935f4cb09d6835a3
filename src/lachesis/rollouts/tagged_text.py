"""Marked parts of a model's text, found in linear time: each function reads every character a fixed number of times.

A regular expression with two open ends, such as ``<answer>(.*?)</answer>``, takes time that grows with the square of
the length of a text with many beginnings and no end, and holds the interpreter meanwhile; a model may write such texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Tool calls of Hermes and Qwen. A turn that ends early has no end of its call.
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BRACE = re.compile(r"\\boxed\{|[{}]")


def tagged(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield the text between each ``opening`` and the next ``closing``, from left to right, without overlaps."""
    at = 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:  # so there is none after a later beginning either
            return
        yield text[start:end]
        at = end + len(closing)


def after_in_order(text: str, marks: tuple[str, ...], at: int = 0) -> int:
    """Return the place after the last of ``marks`` if they occur in order, with any text between; else -1."""
    for mark in marks:
        found = text.find(mark, at)
        if found < 0:
            return -1
        at = found + len(mark)
    return at


def has_line_end(text: str, end: str, at: int) -> bool:
    """Return True if a line after ``at`` ends with ``end``."""
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
    opened: list[int | None] = []  # for each open brace, the place where its box begins, if it belongs to one
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else None)
        elif opened and (start := opened.pop()) is not None:
            longest = max(longest or 0, brace.start() - start)
    return longest
