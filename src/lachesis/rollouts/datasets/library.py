"""Rows from directories and from the hub, through the ``datasets`` library; and parts of a split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError
from lachesis.rollouts.datasets.rows import Row

_DATA_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".tsv", ".parquet", ".ndjson", ".txt"})
_SLICE = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


def is_hub_name(path: str) -> bool:
    """``owner/name`` or ``name``, where nothing of that name is on this disk and nothing looks like a file."""
    if path.startswith((".", "/", "~")) or Path(path).suffix.lower() in _DATA_SUFFIXES or Path(path).exists():
        return False
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None


def read_library(path: str, *, name: str | None, split: str) -> tuple[list[Row], str]:
    """Rows of a dataset on the hub or in a directory, and a fingerprint of their content.

    A directory holds files of data, or what ``Dataset.save_to_disk`` wrote.

    Args:
        split: as the library writes it: ``train``, ``train[:100]``, ``train[10%:]``, ``train+test``.

    Raises:
        DataError: it is not there, cannot be reached, or has no such split or configuration.
    """
    import datasets

    try:
        if _saved_to_disk(Path(path)):
            loaded = _part_of(datasets.load_from_disk(path), path, split)
        else:
            loaded = datasets.load_dataset(path, name, split=split)
        records: Sequence[Mapping[str, Any]] = loaded.to_list()
    except DataError:
        raise
    except Exception as error:  # the library raises errors of a dozen packages
        raise _unreadable(path, name, split, error) from error
    if not records:
        raise DataError(f"the split {split!r} of the dataset {path} is empty", remedy="name another split")
    rows = [Row(f"{path} ({split}), row {number}", record) for number, record in enumerate(records, start=1)]
    return rows, str(loaded._fingerprint)


def select(rows: Sequence[Row], split: str, path: Path) -> list[Row]:
    """The part of a file's rows that ``split`` names: a file has the split ``train`` alone, whole or a slice.

    Raises:
        DataError: the split is another one, malformed, or empty.
    """
    match = _SLICE.fullmatch(split)
    if match is None or match["name"] != "train":
        raise DataError(
            f"{path} is a file, which has no split {split!r}",
            remedy="write train, or a part of it such as train[:100] or train[10%:], or name another file",
        )
    start, stop = (_position(match[end], len(rows)) for end in ("start", "stop"))
    chosen = list(rows[start:stop])
    if not chosen:
        raise DataError(f"{path} has {len(rows)} rows: {split} is empty", remedy="name another part")
    return chosen


def _position(text: str | None, count: int) -> int | None:
    if text is None:
        return None
    return round(int(text[:-1]) / 100 * count) if text.endswith("%") else int(text)


def _saved_to_disk(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _part_of(loaded: Any, path: str, split: str) -> Any:
    """A split, or a part of one, of what was saved to disk. A dataset without splits has ``train`` alone."""
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
        remedy = "go online, download it beforehand on a machine that is, or name a local file in data.path"
        return DataError(
            f"the dataset {what} is not in the cache, and the hub cannot be reached: {kind}: {text}", remedy=remedy
        )
    if (cause := error.__cause__) is not None:
        text = " ".join(str(cause).split())
    return DataError(
        f"cannot read the dataset {what}: {kind}: {text}", remedy="check the path, data.name and data.split"
    )
