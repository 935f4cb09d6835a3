"""Content of the API: scored groups, batches, and the changes that make them durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A group weighs its tokens, or one token for this many bytes of memory if that is more. This bounds the cost of a
# queued token, whatever else a group carries: its JSON and some bytes around it.
BYTES_A_TOKEN = 64
BYTES_AROUND = 640
NOT_QUEUED = -1
# Replies that are kept in case their posts are repeated.
RECEIPTS = 10_000


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Group as the server keeps it: its JSON, and its properties for the queue.

    ``json`` has all keys of the protocol, nulls included, and goes into a batch unchanged. ``problem`` says why no
    trainer could use the group; it is empty if one could, or if it was not checked.
    """

    json: bytes = field(repr=False)
    sequences: int
    tokens: int
    env_id: int | None
    score: float | None = None
    problem: str = ""

    @property
    def weight(self) -> int:
        """Return the group's tokens, as the queue's limit counts them."""
        return max(self.tokens, -(-(len(self.json) + BYTES_AROUND) // BYTES_A_TOKEN))


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group with its number and, once it is queued, its position.

    Positions order the queue. They differ from numbers where a group first waited in its environment's buffer.
    """

    number: int
    group: StoredGroup
    position: int = NOT_QUEUED


@dataclass(slots=True)
class RolloutBatch:
    """Groups that left the queue together. ``owner`` and ``deadline`` are set while an answer is awaited."""

    id: int
    groups: tuple[HeldGroup, ...]
    deliveries: int = 0
    owner: int | None = None
    deadline: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of one request for the store: all of them become durable, or none.

    ``placed`` gives buffered groups a position, ``batched`` says in which batch groups were handed out (None: no longer
    in any). ``packed`` is the one added group as it was received, gzipped; it is shorter than its JSON. ``summary`` is
    the small rest of the state, whole. ``receipts`` are idempotency keys of posts with their replies. ``wipe`` forgets
    everything stored before.
    """

    added: tuple[HeldGroup, ...] = ()
    placed: tuple[tuple[int, int], ...] = ()
    batched: tuple[tuple[int, int | None], ...] = ()
    removed: tuple[int, ...] = ()
    packed: bytes = b""
    receipts: tuple[tuple[str, bytes], ...] = ()
    summary: Mapping[str, Any] | None = None
    wipe: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Whole content of a store, from which a restarted server continues."""

    held: tuple[HeldGroup, ...]
    batch_of: Mapping[int, int]
    receipts: Mapping[str, bytes]
    summary: Mapping[str, Any]
