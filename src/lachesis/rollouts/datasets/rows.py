"""Reading of dataset rows, with their places for messages: files, directories, the hub, and parts of a split."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError
from lachesis.common.hub import cache_alone_where_the_hub_is_away

# The prefix of reasoning-gym tasks.
PREFIX = "reasoning_gym:"

_LINE_REMEDY = "write one JSON object per line, without commas between them or brackets around them"
# Test cases of a programming problem can exceed 131,072 characters, the default limit of Python's csv.
_LONGEST_CELL = 2**31 - 1
_EXAMPLE = 'such as {"prompt": "37+45=", "answer": "28"}'
_DATA_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".tsv", ".parquet", ".ndjson", ".txt"})
_SLICE = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a dataset; ``place`` is the file and line for messages."""

    place: str
    columns: Mapping[str, Any]


def column_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of all columns, in order of first occurrence."""
    return list(dict.fromkeys(name for row in rows for name in row.columns))


def aligned(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with all columns each; missing values are ``None``."""
    names = column_names(rows)
    if all(len(row.columns) == len(names) for row in rows):
        return list(rows)
    return [Row(row.place, {name: row.columns.get(name) for name in names}) for row in rows]


def is_blank(value: object) -> bool:
    """Return True for a value without content: ``None``, whitespace, or an empty list."""
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def describe_type(value: object) -> str:
    """Return the type of a value in JSON's terms, for messages."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def read_file(path: Path) -> list[Row]:
    """Read all rows of a file. The suffix determines the format; the default is JSONL.

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
        remedy = "write one JSON object per line into it" if reader is _read_jsonl else "add at least one problem"
        raise DataError(f"the dataset {path} is empty", remedy=remedy)
    return aligned(rows)


def read_bytes(path: Path) -> bytes:
    """Read the content of a file. Raises DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the dataset {path}: {error.strerror}",
            remedy="check the path; in a configuration it is relative to the configuration's directory",
        ) from error


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, numbered from 1, without a byte order mark."""
    lines = read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def parse_line(place: str, line: bytes) -> Row:
    """Parse one line of JSONL. Raises DataError if it is not a JSON object."""
    value = _parse_json(place, _decode(place, line), _LINE_REMEDY)
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: {describe_type(value)}, not an object", remedy=f"write one JSON object per line, {_EXAMPLE}"
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
    """Return True for JSONL: the first line is complete JSON, and not the only line with ``{"data": [...]}``."""
    first, _, rest = text.lstrip().partition("\n")
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
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
                    remedy="quote values that contain the separator or a line break",
                )
            rows.append(Row(place, {name: value or None for name, value in record.items()}))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num + 1}: malformed CSV: {error}",
            remedy="correct the quotes in the row that begins on this line",
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
        raise DataError(f"{path}: not a readable Parquet file: {error}", remedy="write the file again") from error
    return [Row(f"{path}, row {number}", from_arrow(record)) for number, record in enumerate(records, start=1)]


def from_arrow(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as written, without the keys that Arrow adds to messages and tool descriptions.

    In Arrow all structs of a column have the same keys, with null for missing ones; templates check for ``tool_calls``
    in messages and would show the model invented arguments. ``role`` and ``content`` always stay. Chats may be nested
    in other columns, such as a list of dialogues.
    """
    return {name: _with_written_chats(value) for name, value in record.items()}


def _with_written_chats(value: Any) -> Any:
    if _is_chat(value):
        return _written(value)
    if isinstance(value, Mapping):
        return {name: _with_written_chats(inner) for name, inner in value.items()}
    return [_with_written_chats(inner) for inner in value] if isinstance(value, list) else value


def _is_chat(value: object) -> bool:
    """Return True for a list of messages, or of tool descriptions."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and not {"role", "function", "parameters"}.isdisjoint(one) for one in value)
    )


def _written(value: Any, *, always: tuple[str, ...] = ("role", "content")) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _written(inner, always=()) for name, inner in value.items() if inner is not None or name in always
        }
    return [_written(inner, always=always) for inner in value] if isinstance(value, list) else value


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
        raise DataError(f"{place}: this JSON cannot be read: {error}", remedy="correct this line") from error


def is_hub_name(path: str) -> bool:
    """Return True for ``owner/name`` or ``name`` that neither exists on disk nor looks like a file."""
    if path.startswith((".", "/", "~")) or Path(path).suffix.lower() in _DATA_SUFFIXES or Path(path).exists():
        return False
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None


def read_library(path: str, *, name: str | None, split: str) -> tuple[list[Row], str]:
    """Return the rows of a dataset on the hub or in a directory, and a fingerprint of their content.

    A directory has data files, or the output of ``Dataset.save_to_disk``.

    Args:
        split: in the notation of datasets: ``train``, ``train[:100]``, ``train[10%:]``, ``train+test``.

    Raises:
        DataError: it does not exist, cannot be reached, or does not have this split or configuration.
    """
    import datasets

    try:
        if any(Path(path, name).is_file() for name in ("state.json", "dataset_dict.json")):  # of save_to_disk
            loaded = _part_of(datasets.load_from_disk(path), path, split)
        else:
            with cache_alone_where_the_hub_is_away(path):
                loaded = datasets.load_dataset(path, name, split=split)
        records: Sequence[Mapping[str, Any]] = loaded.to_list()
    except DataError:
        raise
    except Exception as error:  # the library raises errors from a dozen packages
        raise _unreadable(path, name, split, error) from error
    if not records:
        raise DataError(f"the split {split!r} of the dataset {path} is empty", remedy="name another split")
    rows = [Row(f"{path} ({split}), row {number}", from_arrow(record)) for number, record in enumerate(records, 1)]
    return rows, str(loaded._fingerprint)


def read_made(spec: str) -> tuple[list[Row], str]:
    """Return the rows of reasoning-gym tasks, and a digest of their content.

    A row has the question as ``problem``, the answer as ``solution``, and everything for scoring as ``entry``.

    Raises:
        ConfigError: the task does not exist, or its arguments are invalid.
        DependencyError: the library is not installed.
    """
    from lachesis.plugins.environments.reasoning_gym import entries, parse_tasks

    rows: list[Row] = []
    for task in parse_tasks(spec):
        for number, entry in enumerate(entries(task), start=1):
            columns = {"problem": entry["question"], "solution": entry["answer"], "entry": entry}
            rows.append(Row(f"reasoning_gym {task.name}, problem {number}", columns))
    digest = hashlib.sha256(repr([row.columns for row in rows]).encode("utf-8", "surrogatepass"))
    return rows, digest.hexdigest()


def read_object(value: Any, *, name: str) -> tuple[list[Row], str]:
    """Return the rows of a dataset that is a Python object, and a digest of their content.

    Args:
        value: a list of dictionaries, a ``datasets.Dataset``, or a pandas ``DataFrame`` (NaN becomes ``None``).
        name: its name in messages.

    Raises:
        DataError: it has another type, or is empty.
    """
    records = _records(value)
    if not isinstance(records, list | tuple):
        raise DataError(
            f"{name} is {describe_type(value)}, not a dataset",
            remedy="give a list of dictionaries, a datasets.Dataset (one split of it), a DataFrame, or a path",
        )
    if not records:
        raise DataError(f"{name} is empty", remedy="give at least one problem")
    for number, record in enumerate(records, start=1):
        if not isinstance(record, Mapping):
            raise DataError(
                f"{name}, row {number}: {describe_type(record)}, not a dictionary", remedy=f"give rows {_EXAMPLE}"
            )
    rows = [Row(f"{name}, row {number}", dict(record)) for number, record in enumerate(records, start=1)]
    content = json.dumps([dict(record) for record in records], sort_keys=True, default=repr)
    return rows, hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _records(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return value
    if hasattr(value, "iloc"):  # pandas uses NaN for a missing cell of any type
        return [
            {name: None if isinstance(cell, float) and math.isnan(cell) else cell for name, cell in record.items()}
            for record in value.to_dict("records")
        ]
    if not callable(getattr(value, "to_list", None)):
        return value
    return [from_arrow(one) if isinstance(one, Mapping) else one for one in value.to_list()]


def select(rows: Sequence[Row], split: str, path: Path) -> list[Row]:
    """Return the rows of ``split``: a file has only the split ``train``, whole or sliced.

    Raises:
        DataError: the split has another name, is malformed, or is empty.
    """
    match = _SLICE.fullmatch(split)
    if match is None or match["name"] != "train":
        raise DataError(
            f"{path} is a file, so it has no split {split!r}",
            remedy="use train, or a part of it such as train[:100] or train[10%:], or name another file",
        )
    start, stop = (_position(match[end], len(rows)) for end in ("start", "stop"))
    chosen = list(rows[start:stop])
    if not chosen:
        raise DataError(f"{path} has {len(rows)} rows, of which {split} is none", remedy="choose another part")
    return chosen


def _position(text: str | None, count: int) -> int | None:
    if text is None:
        return None
    return round(int(text[:-1]) / 100 * count) if text.endswith("%") else int(text)


def _part_of(loaded: Any, path: str, split: str) -> Any:
    """Return a split, or part of one, of a dataset saved to disk. A dataset without splits has only ``train``."""
    match = _SLICE.fullmatch(split)
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if match is None or match["name"] not in splits:
        raise DataError(
            f"the dataset {path} has no split {split!r}", remedy=f"name one of: {', '.join(map(str, splits))}"
        )
    dataset = splits[match["name"]]
    start, stop = (_position(match[end], len(dataset)) for end in ("start", "stop"))
    return dataset.select(range(len(dataset))[start:stop])


def _unreadable(path: str, name: str | None, split: str, error: Exception) -> DataError:
    what = f"{path}{f', {name}' if name else ''}, split {split!r}"
    kind, text = type(error).__name__, " ".join(str(error).split())
    offline = kind in ("OfflineModeIsEnabled", "ConnectionError", "LocalEntryNotFoundError") or "reach" in text
    if offline and not Path(path).exists():
        return DataError(
            f"{path} is not a file or directory here, the dataset {what} is not in the cache, and the hub cannot "
            f"be reached: {kind}: {text}",
            remedy="correct the path; or, for a dataset on the hub, go online, or download it beforehand on a machine "
            "that is online",
        )
    if (cause := error.__cause__) is not None:
        text = " ".join(str(cause).split())
    return DataError(
        f"cannot read the dataset {what}: {kind}: {text}", remedy="check the path, data.name and data.split"
    )
