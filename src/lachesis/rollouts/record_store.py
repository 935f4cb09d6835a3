"""File of records that survives a kill: written by its own thread, in SQLite (the standard library's).

Records are written soon after they are appended, but not forced to disk: a killed process loses those that its thread
had not reached, a power cut those that the system had not written.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.common.json_values import json_bytes
from lachesis.process.threads import DaemonThread

logger = logging.getLogger("lachesis")

# Its order must be this: a file shrinks only where that was said before its first table. Without WAL one file is all.
_SETUP = """
PRAGMA auto_vacuum = FULL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS records (place INTEGER PRIMARY KEY, key INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_key ON records (key);
"""
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its key, which several records may share."""

    key: int
    record: Mapping[str, Any]


class RecordStore:
    """Records by key; dropped ones leave the file again.

    A file that cannot be written causes one warning, and is left alone then.

    Args:
        path: the file; made with the first record.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._thread = DaemonThread("lachesis-records")
        self._database: sqlite3.Connection | None = None
        self._closed = self._broken = False

    def read(self) -> tuple[list[Entry], int]:
        """Return the remaining records in order, and the number of damaged ones. Call it before adding any.

        Raises:
            OSError: the file does not hold records; it is renamed to NAME.damaged.
        """
        if not self._path.exists():
            return [], 0
        try:
            with closing(self._connected()) as database:
                rows = database.execute("SELECT key, record FROM records ORDER BY place").fetchall()
        except sqlite3.Error as error:
            aside = self._path.replace(self._path.with_name(f"{self._path.name}.damaged"))
            raise OSError(f"{self._path} is damaged ({error}), and is {aside.name} now") from error
        entries: list[Entry] = []
        for key, record in rows:
            try:
                entries.append(Entry(key, json.loads(record)))
            except ValueError:
                continue
        return entries, len(rows) - len(entries)

    def append(self, key: int, make: Callable[[], Mapping[str, Any]]) -> None:
        """Add the record that ``make`` returns, which the thread calls. Returns at once."""
        self._submit(
            lambda: self._execute("INSERT INTO records (key, record) VALUES (?, ?)", [(key, json_bytes(make()))])
        )

    def drop(self, keys: Iterable[int]) -> None:
        """Drop the records of these keys. Returns at once."""
        dropped = [(key,) for key in sorted(set(keys))]
        if dropped:
            self._submit(lambda: self._execute("DELETE FROM records WHERE key = ?", dropped))

    def flush(self) -> None:
        """Wait until the thread has done its work, for some seconds at most."""
        wait([self._thread.submit(lambda: None, {})], timeout=_CLOSE_S)

    def close(self) -> None:
        """Write pending records, and end the thread. Idempotent."""
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

    def _execute(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        if self._database is None:
            self._database = self._connected()
        with self._database:
            self._database.executemany(statement, rows)

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path)
        try:
            database.executescript(_SETUP)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _end(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
