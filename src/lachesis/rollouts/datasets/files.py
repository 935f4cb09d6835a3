"""Rows from files: JSONL, JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError
from lachesis.rollouts.datasets.rows import Row, aligned, describe_type

_LINE_REMEDY = "write one JSON object a line, each on one line, without commas or brackets around them"
# Test cases of a programming problem are longer than the 131,072 characters that Python's reader takes at first.
_LONGEST_CELL = 2**31 - 1
_EXAMPLE = 'such as {"prompt": "37+45=", "answer": "28"}'


def read_file(path: Path) -> list[Row]:
    """All rows of a file, which its suffix tells the format of; a file without a known one is JSONL.

    - ``.jsonl``: an object a line; blank lines are skipped
    - ``.json``: a list of objects, ``{"data": [...]}`` with one, or JSONL under that name
    - ``.csv``, ``.tsv``: a header, and strings only; an empty cell is ``None``
    - ``.parquet``

    Raises:
        DataError: the file is missing, empty or malformed; the message names file and line.
    """
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower(), _read_jsonl)
    rows = reader(path)
    if not rows:
        remedy = "give it one JSON object a line" if reader is _read_jsonl else "give it at least one problem"
        raise DataError(f"the dataset {path} is empty", remedy=remedy)
    return aligned(rows)


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises DataError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the dataset {path}: {error.strerror}",
            remedy="check the path; in a configuration it is relative to the configuration's directory",
        ) from error


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, numbered from 1, without a byte order mark."""
    lines = read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def parse_line(place: str, line: bytes) -> Row:
    """One line of JSONL. Raises DataError where it is no JSON object."""
    value = _parse_json(place, _decode(place, line), _LINE_REMEDY)
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: {describe_type(value)}, not an object", remedy=f"write one JSON object a line, {_EXAMPLE}"
        )
    return Row(place, value)


def _read_jsonl(path: Path) -> list[Row]:
    return [parse_line(f"{path}, line {number}", line) for number, line in lines_of(path)]


def _read_json(path: Path) -> list[Row]:
    text = _decode(str(path), read_bytes(path).removeprefix(b"\xef\xbb\xbf"))
    if not text.strip():
        return []
    if text.lstrip().startswith("{") and _first_line_is_json(text):
        return _read_jsonl(path)
    value = _parse_json(str(path), text, "write a list of objects")
    entries = value.get("data") if isinstance(value, dict) else value
    return _from_list(path, value, entries)


def _from_list(path: Path, document: object, entries: object) -> list[Row]:
    if not isinstance(entries, list):
        what = 'an object without a list under "data"' if isinstance(document, dict) else describe_type(document)
        raise DataError(
            f"{path}: {what}, not a list of objects", remedy=f"write a list of objects, {_EXAMPLE}, or JSONL"
        )
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise DataError(
                f"{path}, entry {number}: {describe_type(entry)}, not an object", remedy=f"write objects, {_EXAMPLE}"
            )
    return [Row(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, start=1)]


def _first_line_is_json(text: str) -> bool:
    """Whether this is JSONL: its first line is whole, and either no ``{"data": [...]}`` or not the only one."""
    first, _, rest = text.lstrip().partition("\n")
    try:
        value = json.loads(first)
    except ValueError:
        return False
    return bool(rest.strip()) or not isinstance(value.get("data"), list)


def _read_csv(path: Path) -> list[Row]:
    text = _decode(str(path), read_bytes(path).removeprefix(b"\xef\xbb\xbf"))
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.DictReader(
        io.StringIO(text, newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True
    )
    rows = []
    try:
        _require_different_names(path, reader.fieldnames or [])
        for record in reader:
            place = f"{path}, line {reader.line_num}"
            if None in record or None in record.values():
                raise DataError(
                    f"{place}: {'more' if None in record else 'fewer'} values than the header has columns",
                    remedy="quote values that hold the separator or a line end",
                )
            rows.append(Row(place, {name: value or None for name, value in record.items()}))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num + 1}: malformed CSV: {error}",
            remedy="mend the quotes of the row that begins in that line",
        ) from error
    return rows


def _require_different_names(path: Path, names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(
            f"{path}: the header has two columns called {twice[0]!r}", remedy="rename one, or remove it from the file"
        )


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowException, BufferReader
    from pyarrow.parquet import read_table

    content = read_bytes(path)
    try:
        records: list[dict[str, Any]] = read_table(BufferReader(content)).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}", remedy="write the file anew") from error
    return [Row(f"{path}, row {number}", record) for number, record in enumerate(records, start=1)]


def _decode(place: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text (byte {error.start + 1}: {error.reason})", remedy="save the file as UTF-8"
        ) from error


def _parse_json(place: str, text: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"{place}: malformed JSON: {error.msg} at {line}column {error.colno}", remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: JSON that cannot be read: {error}", remedy="mend that line") from error
