"""The problems of GSM8K: from files, a cache of the ``datasets`` library, or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError

_SUFFIXES = (".jsonl", ".parquet")
_REMEDY = "give a directory with train and test as .jsonl or .parquet, such a file, or a name on the hub"


@dataclass(frozen=True, slots=True)
class MathProblem:
    """A question in words and its final answer, a number as text."""

    question: str
    answer: str


def load_split(data: str, split: str) -> list[MathProblem]:
    """The problems of ``split``, "train" or "test".

    Args:
        data: a directory that has files of the split (also one laid out as on the hub, with ``main/`` in it), a
            single file, which is every split, or the name of a dataset on the hub or in its cache.

    Raises:
        DataError: there is none, it cannot be read, or a row of it is no problem of GSM8K.
    """
    place = Path(data).expanduser()
    if place.is_file():
        rows = _read_file(place)
    elif place.is_dir():
        rows = [row for path in _files_of(place, split) for row in _read_file(path)]
    elif place.is_absolute() or data.startswith(("./", "../", "~")) or place.suffix in _SUFFIXES:
        raise DataError(f"there is no GSM8K at {data}", remedy=_REMEDY)
    else:
        rows = _read_library(data, split)
    if not rows:
        raise DataError(f"{data} has no problems in its split {split}", remedy=_REMEDY)
    return [_problem(f"{data}, {split}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _files_of(directory: Path, split: str) -> list[Path]:
    for folder in (directory, directory / "main", directory / "data"):
        for suffix in _SUFFIXES:
            found = sorted({*folder.glob(f"{split}{suffix}"), *folder.glob(f"{split}-*{suffix}")})
            if found:
                return found
    raise DataError(f"{directory} has no file of the split {split}", remedy=_REMEDY)


def _read_file(path: Path) -> list[Mapping[str, Any]]:
    try:
        if path.suffix == ".parquet":
            from pyarrow import ArrowException, parquet

            try:
                return parquet.read_table(path).to_pylist()
            except ArrowException as error:
                raise DataError(f"{path} is no Parquet file: {error}", remedy="write it anew") from error
        return _json_lines(path, path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy=_REMEDY) from error


def _json_lines(path: Path, lines: Iterable[str]) -> list[Mapping[str, Any]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: malformed JSON: {error}", remedy="mend that line") from error
    return rows


def _read_library(name: str, split: str) -> list[Mapping[str, Any]]:
    import datasets

    try:
        return datasets.load_dataset(name, "main", split=split).to_list()
    except Exception as error:  # the library raises errors of a dozen packages
        text = " ".join(str(error).split())
        raise DataError(
            f"the dataset {name} (main, {split}) cannot be loaded: {type(error).__name__}: {text}",
            remedy="go online, fill the cache beforehand, or give a local path with --env.data",
        ) from error


def _problem(place: str, row: Any) -> MathProblem:
    question, solution = (row.get(name) if isinstance(row, Mapping) else None for name in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(solution, str) or "####" not in solution:
        raise DataError(f"{place} is no problem of GSM8K", remedy='rows have "question", and "answer" with "#### 42"')
    return MathProblem(question, solution.rpartition("####")[2].strip().replace(",", ""))
