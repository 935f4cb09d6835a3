"""State directory: a SQLite database that every change brings up to date.

A change is one transaction, committed before its reply goes out. Committed changes survive the death of the process
at any moment; they are flushed to disk once a second, so that a power cut loses at most one second.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lachesis.common.errors import ConfigError, LachesisError
from lachesis.plugins.atropos.api.bodies import inflate
from lachesis.plugins.atropos.api.entries import RECEIPTS, Change, HeldGroup, Snapshot, StoredGroup
from lachesis.plugins.atropos.api.wire import parse_group

# The fields of a group that change are separate from its content, because SQLite rewrites whole rows.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS held (
    number INTEGER PRIMARY KEY, position INTEGER, env_id INTEGER, sequences INTEGER, tokens INTEGER, score REAL,
    batch INTEGER
);
CREATE TABLE IF NOT EXISTS content (number INTEGER PRIMARY KEY, json BLOB);
CREATE TABLE IF NOT EXISTS receipts (place INTEGER PRIMARY KEY, key TEXT UNIQUE, reply BLOB);
CREATE TABLE IF NOT EXISTS summary (place INTEGER PRIMARY KEY, document TEXT);
"""
# The log is moved into the database once a second, or by a commit once it has this many pages.
_MOST_LOGGED_PAGES = 16384
_GZIP_MAGIC = b"\x1f\x8b"
_NO_LIMIT = 1 << 40


class StoreFailed(LachesisError):
    """Error: the state directory could not be written; nothing of the request was kept."""


class Journal:
    """Store of changes that returns a snapshot. Groups stay in memory too, so a snapshot need not read them again.

    Args:
        directory: created if missing. One process may use it at a time.

    Raises:
        ConfigError: the directory cannot be written, or another server uses it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups: dict[int, StoredGroup] = {}
        self._under_sync = threading.Lock()
        remedy = "give each server its own writable directory"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One connection to write, and one with which another thread syncs, so that no commit waits for it.
            self._database, self._syncing = self._connect(), self._connect()
            self._database.executescript(_SCHEMA)
            self._read_groups()
        except BlockingIOError as error:
            raise ConfigError(f"another server uses the state directory {directory}", remedy=remedy) from error
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the state directory {directory} cannot be used: {error}", remedy=remedy) from error

    def snapshot(self) -> Snapshot:
        """Return all committed state. Raises StoreFailed if it cannot be read."""
        with self._errors():
            rows = self._database.execute("SELECT number, position, batch FROM held ORDER BY number").fetchall()
            summary = self._database.execute("SELECT document FROM summary").fetchone()
            return Snapshot(
                held=tuple(HeldGroup(number, self._groups[number], position) for number, position, _ in rows),
                batch_of={number: batch for number, _, batch in rows if batch is not None},
                receipts=dict(self._database.execute("SELECT key, reply FROM receipts ORDER BY place")),
                summary=json.loads(summary[0]) if summary else {},
            )

    def commit(self, change: Change) -> None:
        """Write ``change``: it survives the process from here on.

        Raises:
            StoreFailed: it could not be written. The committed state is unchanged.
        """
        with self._errors(), self._database:
            self._write(change)
        if change.wipe:
            self._groups.clear()
        self._groups.update((held.number, held.group) for held in change.added)
        for number in change.removed:
            self._groups.pop(number, None)

    def sync(self) -> None:
        """Flush commits to disk in another thread, while commits continue. Raises StoreFailed."""
        with self._errors(), self._under_sync:
            self._syncing.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Sync, and let another server have the directory."""
        with self._errors(), self._under_sync:
            self._syncing.close()
            self._database.close()
        os.close(self._lock)

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._directory / "state.sqlite", check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_MOST_LOGGED_PAGES}")
        return database

    def _read_groups(self) -> None:
        rows = self._database.execute(
            "SELECT number, json, sequences, tokens, env_id, score FROM held JOIN content USING (number)"
        )
        for number, text, *facts in rows:
            if text.startswith(_GZIP_MAGIC):
                text = parse_group(inflate(text, limit=_NO_LIMIT), check=False).json
            self._groups[number] = StoredGroup(text, *facts)

    def _write(self, change: Change) -> None:
        many = self._database.executemany
        for table in ("held", "content", "receipts") if change.wipe else ():
            self._database.execute(f"DELETE FROM {table}")
        facts = [(held.number, held.position, held.group) for held in change.added]
        many(
            "INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?, ?, ?, NULL)",
            [(number, place, one.env_id, one.sequences, one.tokens, one.score) for number, place, one in facts],
        )
        many(
            "INSERT OR REPLACE INTO content VALUES (?, ?)",
            [(number, change.packed or group.json) for number, _, group in facts],
        )
        many("UPDATE held SET position = ? WHERE number = ?", [(place, number) for number, place in change.placed])
        many("UPDATE held SET batch = ? WHERE number = ?", [(batch, number) for number, batch in change.batched])
        for table in ("held", "content"):
            many(f"DELETE FROM {table} WHERE number = ?", [(number,) for number in change.removed])
        many("INSERT OR REPLACE INTO receipts (key, reply) VALUES (?, ?)", change.receipts)
        if change.receipts:
            oldest = "(SELECT max(place) FROM receipts) - ?"
            self._database.execute(f"DELETE FROM receipts WHERE place <= {oldest}", (RECEIPTS,))
        if change.summary is not None:
            self._database.execute("INSERT OR REPLACE INTO summary VALUES (0, ?)", (json.dumps(change.summary),))

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreFailed(
                f"the state directory {self._directory} could not be written: {error}",
                remedy="free some disk space; changes are refused until it can be written again",
            ) from error
