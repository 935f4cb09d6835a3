"""A file of records that outlives a kill: appended by a thread of its own, each with a checksum, and kept small.

A line is the CRC-32 of a record, a space, and the record as JSON. What is appended is written soon after, not forced to
disk: a killed process loses what its thread had not come to, a power cut what the system had not written. A line that
is not whole is passed over.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import PydanticSerializationError, to_json

from lachesis.common.files import write_atomic
from lachesis.common.threads import DaemonThread

logger = logging.getLogger("lachesis")

_KEY, _RECORD, _DROPPED = "key", "record", "dropped"
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its key, of which there may be several."""

    key: int
    record: Mapping[str, Any]


class Journal:
    """Records by key, of which those that are dropped leave the file again.

    The file is written anew once what was dropped is more than what is left, and more than ``slack_bytes``. A file that
    cannot be written is warned of once, and then left as it is.

    Args:
        path: the file; made with the first record.
    """

    def __init__(self, path: Path, *, slack_bytes: int = 1 << 20) -> None:
        self._path = Path(path)
        self._slack_bytes = slack_bytes
        self._thread = DaemonThread("lachesis-journal")
        self._file: BinaryIO | None = None
        self._bytes: Counter[int] = Counter()  # by key, of records that are not dropped
        self._dead_bytes = 0
        self._closed = self._broken = False

    def read(self) -> tuple[list[Entry], int]:
        """The records of an earlier process that were not dropped, in order, and how many lines were damaged.

        The file is written anew without the others. Once, before the first record of this process.

        Raises:
            OSError: it cannot be read or written.
        """
        if not self._path.exists():
            return [], 0
        found = [_parsed(line) for line in self._path.read_bytes().splitlines()]
        lines = [line for line in found if line is not None]
        entries = _left(lines)
        content = [_line({_KEY: entry.key, _RECORD: entry.record}) for entry in entries]
        write_atomic(self._path, b"".join(content), durable=False)
        self._bytes = Counter()
        for entry, line in zip(entries, content, strict=True):
            self._bytes[entry.key] += len(line)
        return entries, len(found) - len(lines)

    def append(self, key: int, make: Callable[[], Mapping[str, Any]]) -> None:
        """Add the record that ``make`` returns, which the thread calls. Returns at once."""
        self._submit(lambda: self._append(key, make))

    def drop(self, keys: Iterable[int]) -> None:
        """The records of these keys are needed no more. Returns at once."""
        dropped = sorted(set(keys))
        if dropped:
            self._submit(lambda: self._drop(dropped))

    def flush(self) -> None:
        """Wait until the thread has done what it was given, for some seconds at most."""
        wait([self._thread.submit(lambda: None, {})], timeout=_CLOSE_S)

    def close(self) -> None:
        """Write what is left to be written, and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        wait([self._thread.submit(self._end, {})], timeout=_CLOSE_S)
        self._thread.abandon()

    def _submit(self, work: Callable[[], None]) -> None:
        if not self._closed:
            self._thread.submit(self._guarded, {"work": work})

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            work()
        except Exception as error:  # the run is worth more than what would be saved of it
            self._broken = True
            logger.warning("%s cannot be written, so it keeps nothing from now on: %s", self._path, error)

    def _append(self, key: int, make: Callable[[], Mapping[str, Any]]) -> None:
        self._bytes[key] += self._write(_line({_KEY: key, _RECORD: make()}))

    def _drop(self, keys: list[int]) -> None:
        known = [key for key in keys if key in self._bytes]
        if not known:
            return
        self._dead_bytes += self._write(_line({_DROPPED: known})) + sum(self._bytes.pop(key) for key in known)
        if self._dead_bytes > max(self._slack_bytes, self._bytes.total()):
            self._rewrite()

    def _rewrite(self) -> None:
        """Without what was dropped."""
        self._end()
        lines = [line for raw in self._path.read_bytes().splitlines() if (line := _parsed(raw)) is not None]
        kept = (_line({_KEY: entry.key, _RECORD: entry.record}) for entry in _left(lines))
        write_atomic(self._path, b"".join(kept), durable=False)
        self._dead_bytes = 0

    def _write(self, line: bytes) -> int:
        if self._file is None:
            self._file = self._path.open("ab")
        self._file.write(line)
        self._file.flush()
        return len(line)

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(document: Mapping[str, Any]) -> bytes:
    try:
        content = to_json(document)
    except PydanticSerializationError:  # half a surrogate pair in a text, which UTF-8 cannot hold
        content = json.dumps(document).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """What a line holds; None where it is not whole."""
    checksum, _, content = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(content):
        return None
    return json.loads(content)


def _left(lines: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The records that no later line drops."""
    entries: list[Entry] = []
    dropped: set[int] = set()
    for line in reversed(lines):
        dropped.update(line.get(_DROPPED, ()))
        if _RECORD in line and line[_KEY] not in dropped:
            entries.append(Entry(line[_KEY], line[_RECORD]))
    return entries[::-1]
