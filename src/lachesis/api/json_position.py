"""Where in a JSON document a syntax error lies: the path of keys and indices at its line and column."""

from __future__ import annotations

import re

_PLACE = re.compile(r"at line (\d+) column (\d+)")
# Possessive, with the closing quote optional: a string cut off in the middle costs one pass, whatever is in it.
_SIGN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{},:]', re.DOTALL)
# Reading a document sign by sign is slow; an error further in is placed by line and column alone.
_REACH = 2 << 20
_DEPTH = 16


def path_at(body: bytes, reason: str) -> list[str | int]:
    """The keys and indices, 16 at most, that lead to the place named in ``reason`` ("... at line 1 column 24").

    Empty at the top level, where the reason names no place, and beyond the first 2 MiB.
    """
    place = _PLACE.search(reason)
    if place is None:
        return []
    end = _offset(body, line=int(place[1]), column=int(place[2]))
    return [] if end > _REACH else _path(body[:end])[:_DEPTH]


def _offset(body: bytes, *, line: int, column: int) -> int:
    start = 0
    for _ in range(line - 1):
        start = body.index(b"\n", start) + 1
    return start + max(0, column - 1)


def _path(prefix: bytes) -> list[str | int]:
    path: list[str | int | None] = []
    last = b""
    for match in _SIGN.finditer(prefix):
        sign = match[0]
        if sign in b"[{":
            path.append(0 if sign == b"[" else None)
        elif sign in b"]}":
            if path:
                path.pop()
        elif sign == b"," and path:
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
        elif sign == b":" and path and not isinstance(path[-1], int):
            path[-1] = last[1:-1].decode("utf-8", errors="replace")
        last = sign
    return [part for part in path if part is not None]
