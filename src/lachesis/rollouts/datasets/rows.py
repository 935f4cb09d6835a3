"""A row of a dataset, and where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a dataset; ``place`` is the file and line for messages."""

    place: str
    columns: Mapping[str, Any]


def column_names(rows: Iterable[Row]) -> list[str]:
    """Names of all columns that any row has, in the order in which they come up."""
    return list(dict.fromkeys(name for row in rows for name in row.columns))


def aligned(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with all columns; ``None`` where it had none."""
    names = column_names(rows)
    if all(len(row.columns) == len(names) for row in rows):
        return list(rows)
    return [Row(row.place, {name: row.columns.get(name) for name in names}) for row in rows]


def is_blank(value: object) -> bool:
    """Nothing that one could train on: ``None``, or text of white space only, or an empty list."""
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def describe_type(value: object) -> str:
    """The kind of a value in the words of JSON, for messages."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")
