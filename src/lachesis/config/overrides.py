"""Values that ``--set a.b=c`` writes over those of a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_list, is_object
from lachesis.config.document import Document, Place, describe, dotted, read_value


def apply_overrides(document: Document, overrides: Sequence[str], *, row_sections: Collection[str] = ()) -> None:
    """Write each ``a.b=c`` into the document; ``c`` is YAML, and later overrides win.

    ``a[0]`` and ``a.0`` name an item of a list; the index after the last appends one. If a list has exactly one
    mapping, ``a.b`` names a key of that mapping. Unreadable overrides are added to ``document.problems``. The schema
    checks later whether the keys exist.

    Args:
        row_sections: keys that are lists of mappings, even if the file does not have them yet.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or (written := _parts(path.strip())) is None:
            document.problems.append(f"--set {override}: expected section.key=value")
            continue
        parts = _into_rows(document, written, row_sections)
        if not _reachable(document, parts, path.strip()):
            continue
        _forget(document, parts)
        document.origins[parts] = f"--set {path.strip()}"
        try:
            value = read_value(document, text, name=f"--set {override}", place=parts)
        except ConfigError as error:
            document.problems.append(error.message)
            continue
        _assign(document, parts, value)


def _forget(document: Document, place: Place) -> None:
    """Drop the recorded places of values that an override replaces."""
    for known in [known for known in document.origins if known[: len(place)] == place]:
        del document.origins[known]


def _parts(path: str) -> Place | None:
    """Parse a dotted path into a place: ``("a", 0, "b")`` for ``a[0].b`` or ``a.0.b``; None if a part is empty."""
    parts = tuple(re.sub(r"\[(\d+)\]", r".\1", path).split("."))
    return tuple(int(part) if part.isdecimal() else part for part in parts) if all(parts) else None


def _into_rows(document: Document, parts: Place, row_sections: Collection[str]) -> Place:
    """Return the place with index 0 inserted after each list of one mapping that has no index in the path."""
    place, inside = list(parts), document.data
    for depth in range(1, len(parts)):
        below = _child(inside, place[depth - 1])
        if not isinstance(place[depth], int) and (
            (is_list(below) and len(below) == 1 and is_object(below[0]))
            or (not below and dotted(tuple(place[:depth])) in row_sections)
        ):
            return _into_rows(document, (*place[:depth], 0, *place[depth:]), row_sections)
        inside = below
    return tuple(place)


def _child(data: Any, part: str | int) -> Any:
    if isinstance(part, str):
        return data.get(part) if is_object(data) else None
    return data[part] if is_list(data) and part < len(data) else None


def _reachable(document: Document, parts: Place, name: str) -> bool:
    """Return True if the parents of a place can hold it or do not exist yet; otherwise add a problem."""
    inside: Any = document.data
    for depth, part in enumerate(parts):
        around = parts[:depth]
        if inside is None:
            return True
        if isinstance(part, int) and not is_list(inside):
            found = f"is {describe(inside)}, not a list"
        elif isinstance(part, int) and part > len(inside):
            found = f"is too short for that index; the next item is [{len(inside)}]"
        elif isinstance(part, str) and is_list(inside):
            found = f"is a list; write the item: {dotted((*around, 0))}" + f".{part}"
        elif isinstance(part, str) and not is_object(inside):
            found = f"is {describe(inside)} and has no keys"
        else:
            inside = _child(inside, part)
            continue
        document.problems.append(f"--set {name}: {dotted(around) or 'the file'}{document.at(around)} {found}")
        return False
    return True


def _assign(document: Document, parts: Place, value: Any) -> None:
    """Set the value at a place that :func:`_reachable` accepted; create missing sections and lists around it."""
    inside: Any = document.data
    for depth, part in enumerate(parts):
        if depth + 1 < len(parts) and _child(inside, part) is None:
            document.origins[parts[: depth + 1]] = document.origins[parts]
            _put(inside, part, [] if isinstance(parts[depth + 1], int) else {})
        if depth + 1 == len(parts):
            _put(inside, part, value)
        inside = _child(inside, part)


def _put(inside: Any, part: str | int, value: Any) -> None:
    if isinstance(part, int) and part == len(inside):
        inside.append(value)
    else:
        inside[part] = value
