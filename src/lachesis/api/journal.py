"""The state directory: a journal of changes, in segments that are deleted once nothing in them is needed.

A change is one record, appended with one write before its reply goes out. What was written survives the death of
the process at any moment; the disk is told to keep it once a second, so that a power cut takes no more than that.
A record cut short by such an end was never answered for, and is ignored.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lachesis.api.bodies import inflate
from lachesis.api.records import Change, HeldGroup, Snapshot, StoredGroup
from lachesis.api.wire import parse_group
from lachesis.common.errors import ConfigError, LachesisError
from lachesis.common.files import fsync_path

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 32 << 20
RECEIPTS = 10_000
_HEADER = struct.Struct("<III")  # checksum of the rest, length of the head (JSON), length of the payloads
_GZIP_MAGIC = b"\x1f\x8b"
_NO_LIMIT = 1 << 40
_CARRIED_RECEIPTS = 1_000
# What a group takes beside its payload, roughly.
_ROW_BYTES = 128
_WRITEV_PARTS = 512


class StoreFailed(LachesisError):
    """The state directory could not be written; nothing of the request was kept."""


@dataclass(slots=True)
class _Kept:
    """A group that is still needed: where it was written, at what length, and with which batch it is out."""

    held: HeldGroup
    segment: int
    length: int
    batch: int | None = None


class Journal:
    """Changes in, a snapshot out. What is committed is mirrored in memory, so a snapshot needs no reading.

    Args:
        directory: made where it is missing. One process may use it at a time.
        segment_bytes: a segment that has grown so long is followed by another.

    Raises:
        ConfigError: the directory cannot be written or another server uses it.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._kept: dict[int, _Kept] = {}
        self._receipts: OrderedDict[str, bytes] = OrderedDict()
        self._summary: dict[str, Any] = {}
        # By segment: bytes that are needed, and bytes in all.
        self._live: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._file, self._segment, self._dirty = -1, 0, False
        self._left: list[int] = []
        remedy = "give each server a directory of its own that it may write"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for segment in self._segments_on_disk():
                self._replay(segment)
            self._begin(max(self._live, default=0) + 1)
            self._retire()
        except BlockingIOError as error:
            raise ConfigError(f"another server uses the state directory {directory}", remedy=remedy) from error
        except OSError as error:
            raise ConfigError(f"the state directory {directory} cannot be used: {error}", remedy=remedy) from error

    def snapshot(self) -> Snapshot:
        """All that is committed."""
        return Snapshot(
            held=tuple(kept.held for kept in self._kept.values()),
            batch_of={number: kept.batch for number, kept in self._kept.items() if kept.batch is not None},
            receipts=dict(self._receipts),
            summary=self._summary,
        )

    def commit(self, change: Change) -> None:
        """Append ``change``: it survives the process from here on.

        Raises:
            StoreFailed: it could not be written. What is committed is as it was before.
        """
        try:
            if self._lengths[self._segment] >= self._segment_bytes:
                self._begin(self._segment + 1)
                self._retire()
            self._append(change)
        except OSError as error:
            raise StoreFailed(
                f"the state directory {self._directory} could not be written: {error}",
                remedy="make room on its disk; changes are refused until it can be written again",
            ) from error

    def unsynced(self) -> list[int]:
        """Files with content that the disk may not have yet, for :func:`sync_and_close`, in another thread."""
        files, self._left = self._left, []
        if self._dirty:
            files.append(os.dup(self._file))
            self._dirty = False
        return files

    def close(self) -> None:
        """Sync, and let another server have the directory."""
        sync_and_close([*self.unsynced(), self._file])
        os.close(self._lock)

    # -- writing

    def _append(self, change: Change) -> None:
        head, payloads = _encoded(change)
        start = self._lengths[self._segment]
        length = _write_record(self._file, start, head, payloads)
        self._lengths[self._segment] = start + length
        self._dirty = True
        self._mirror(change, self._segment, [len(payload) for payload in payloads])

    def _begin(self, segment: int) -> None:
        """Begin a segment; it starts with all but the groups, so that earlier ones can be forgotten."""
        path = self._path(segment)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        receipts = tuple(self._receipts.items())[-_CARRIED_RECEIPTS:]
        head, _ = _encoded(Change(summary=self._summary, receipts=receipts))
        try:
            length = _write_record(file, 0, head, [])
            fsync_path(self._directory)
        except OSError:
            os.close(file)
            path.unlink()
            raise
        if self._file >= 0:
            self._left.append(self._file)
        self._file, self._segment, self._dirty = file, segment, True
        self._live[segment], self._lengths[segment] = 0, length

    def _retire(self) -> None:
        """Delete segments of which nothing is needed, oldest first.

        A few old groups must not keep all that came after them on the disk: where less than half of it is needed,
        what the oldest segment still holds is written again.
        """
        while len(self._live) > 2 and sum(self._lengths.values()) > 2 * sum(self._live.values()):
            oldest = min(self._live)
            kept = [entry for entry in self._kept.values() if entry.segment == oldest]
            if kept:
                out = tuple((entry.held.number, entry.batch) for entry in kept if entry.batch is not None)
                self._append(Change(added=tuple(entry.held for entry in kept), batched=out))
            self._path(oldest).unlink()
            del self._live[oldest], self._lengths[oldest]

    # -- what is committed

    def _mirror(self, change: Change, segment: int, lengths: list[int]) -> None:
        if change.wipe:
            self._kept.clear()
            self._receipts.clear()
            self._live = dict.fromkeys(self._live, 0)
        for held, length in zip(change.added, lengths, strict=True):
            self._forget(held.number)
            self._kept[held.number] = _Kept(held=held, segment=segment, length=length + _ROW_BYTES)
            self._live[segment] += length + _ROW_BYTES
        # On replay, what these name may have been in a segment that is gone: then it was not needed any more.
        for number, position in change.placed:
            if number in self._kept:
                self._kept[number].held = replace(self._kept[number].held, position=position)
        for number, batch in change.batched:
            if number in self._kept:
                self._kept[number].batch = batch
        for number in change.removed:
            self._forget(number)
        for key, reply in change.receipts:
            self._receipts[key] = reply
        while len(self._receipts) > RECEIPTS:
            self._receipts.popitem(last=False)
        if change.summary is not None:
            self._summary = dict(change.summary)

    def _forget(self, number: int) -> None:
        kept = self._kept.pop(number, None)
        if kept is not None:
            self._live[kept.segment] -= kept.length

    # -- reading

    def _replay(self, segment: int) -> None:
        path = self._path(segment)
        data = path.read_bytes()
        self._live[segment], self._lengths[segment] = 0, len(data)
        whole = 0
        for end, change, lengths in _records(data):
            self._mirror(change, segment, lengths)
            whole = end
        if whole < len(data):
            logger.warning("%s: ignored %d bytes of a record that was not finished", path, len(data) - whole)

    def _segments_on_disk(self) -> list[int]:
        return sorted(int(path.stem) for path in self._directory.glob("*.journal"))

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}.journal"


def _encoded(change: Change) -> tuple[bytes, list[bytes]]:
    """A change as a JSON head and the payloads of its groups."""
    payloads = [change.packed] if change.packed else [held.group.json for held in change.added]
    head: dict[str, Any] = {}
    if change.added:
        head["added"] = [
            [held.number, held.position, held.group.env_id, held.group.sequences, held.group.tokens,
             held.group.score, len(payload)]
            for held, payload in zip(change.added, payloads, strict=True)
        ]  # fmt: skip
    for name in ("placed", "batched", "removed", "wipe"):
        if getattr(change, name):
            head[name] = getattr(change, name)
    if change.receipts:
        head["receipts"] = [(key, reply.decode()) for key, reply in change.receipts]
    if change.summary is not None:
        head["summary"] = change.summary
    return json.dumps(head, separators=(",", ":")).encode(), payloads


def _records(data: bytes) -> Iterator[tuple[int, Change, list[int]]]:
    """The whole records at the start of ``data``: where each ends, its change, and the lengths of its payloads."""
    view, at = memoryview(data), 0
    while at + _HEADER.size <= len(data):
        checksum, head_length, payload_length = _HEADER.unpack_from(data, at)
        middle = at + _HEADER.size + head_length
        end = middle + payload_length
        if end > len(data) or _checksum(view[at + _HEADER.size : middle], [view[middle:end]]) != checksum:
            return
        head = json.loads(bytes(view[at + _HEADER.size : middle]))
        yield end, *_decoded(head, view[middle:end])
        at = end


def _decoded(head: dict[str, Any], payload: memoryview) -> tuple[Change, list[int]]:
    at = 0
    added: list[HeldGroup] = []
    for number, position, env_id, sequences, tokens, score, length in head.get("added", ()):
        text = bytes(payload[at : at + length])
        if text.startswith(_GZIP_MAGIC):
            text = parse_group(inflate(text, limit=_NO_LIMIT), check=False).json
        group = StoredGroup(json=text, sequences=sequences, tokens=tokens, env_id=env_id, score=score)
        added.append(HeldGroup(number=number, group=group, position=position))
        at += length
    change = Change(
        added=tuple(added),
        placed=tuple((number, position) for number, position in head.get("placed", ())),
        batched=tuple((number, batch) for number, batch in head.get("batched", ())),
        removed=tuple(head.get("removed", ())),
        receipts=tuple((key, reply.encode()) for key, reply in head.get("receipts", ())),
        summary=head.get("summary"),
        wipe=head.get("wipe", False),
    )
    return change, [row[-1] for row in head.get("added", ())]


def _checksum(head: bytes | memoryview, payloads: list[Any]) -> int:
    value = zlib.crc32(head)
    for payload in payloads:
        value = zlib.crc32(payload, value)
    return value


def _write_record(file: int, start: int, head: bytes, payloads: list[bytes]) -> int:
    """Append a record to a file that is ``start`` bytes long; returns its length, or leaves the file as it was."""
    header = _HEADER.pack(_checksum(head, payloads), len(head), sum(map(len, payloads)))
    parts = [header, head, *payloads]
    length = sum(map(len, parts))
    try:
        written = os.writev(file, parts) if len(parts) <= _WRITEV_PARTS else 0
        rest = b"".join(parts)[written:] if written < length else b""
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        # Half a record would hide those that follow it.
        os.ftruncate(file, start)
        raise
    return length


def sync_and_close(files: list[int]) -> None:
    """Have the disk keep what was written to these files."""
    for file in files:
        os.fdatasync(file)
        os.close(file)
