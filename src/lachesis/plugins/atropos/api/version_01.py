"""Reads the state directory of version 0.1: segments of records, each a change with its checksum."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.plugins.atropos.api.entries import Change, HeldGroup, StoredGroup

# Checksum of the rest, length of the head (JSON), length of the payloads.
_HEADER = struct.Struct("<III")


def segments(directory: Path) -> list[Path]:
    """Its files, oldest first; empty where the directory is of a later version."""
    return sorted(directory.glob("*.journal"))


def changes(directory: Path) -> Iterator[Change]:
    """All that was committed, in order. Payloads stay as they were posted, gzipped or not.

    A record that was cut short when its server died was never answered for, and ends its segment.

    Raises:
        OSError: a segment cannot be read.
    """
    for path in segments(directory):
        yield from _records(memoryview(path.read_bytes()))


def _records(data: memoryview) -> Iterator[Change]:
    at = 0
    while at + _HEADER.size <= len(data):
        checksum, head_length, payload_length = _HEADER.unpack_from(data, at)
        start = at + _HEADER.size
        middle, at = start + head_length, start + head_length + payload_length
        if at > len(data) or zlib.crc32(data[start:at]) != checksum:
            return
        yield _change(json.loads(bytes(data[start:middle])), data[middle:at])


def _change(head: Mapping[str, Any], payload: memoryview) -> Change:
    added: list[HeldGroup] = []
    at = 0
    for number, position, env_id, sequences, tokens, score, length in head.get("added", ()):
        text = bytes(payload[at : at + length])
        added.append(HeldGroup(number, StoredGroup(text, sequences, tokens, env_id, score), position))
        at += length
    summary = head.get("summary")
    return Change(
        added=tuple(added),
        placed=tuple((number, position) for number, position in head.get("placed", ())),
        batched=tuple((number, batch) for number, batch in head.get("batched", ())),
        removed=tuple(head.get("removed", ())),
        receipts=tuple((key, reply.encode()) for key, reply in head.get("receipts", ())),
        summary=summary and {**summary, "environments": _environments(summary["environments"])},
        wipe=head.get("wipe", False),
    )


def _environments(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As they are kept now: what an environment asked for is a record of its own."""
    kept = ("max_token_length", "desired_name", "weight", "group_size")
    return [
        {
            "name": one["name"],
            "connected": one["connected"],
            "asked": {name: one[name] for name in kept} | {"min_batch_allocation": one["minimum"]},
        }
        for one in records
    ]
