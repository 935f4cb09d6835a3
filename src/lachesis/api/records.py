"""What the API holds: scored groups, batches, and the changes that make them durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A group weighs its tokens, or one token for so many bytes of its JSON where that is more: this bounds the
# memory that a queued token can cost, whatever else a group carries.
BYTES_A_TOKEN = 64


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """One group as it came off the wire.

    ``json`` has all keys of the protocol, nulls included, and goes into a batch as it is. ``problem`` says why
    no trainer could use the group; empty where one could, or where nobody asked.
    """

    json: bytes = field(repr=False)
    sequences: int
    tokens: int
    env_id: int | None
    score: float | None = None
    problem: str = ""

    @property
    def weight(self) -> int:
        """Tokens that the group counts for in the limit of the queue."""
        return max(self.tokens, -(-len(self.json) // BYTES_A_TOKEN))


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group with its number, unique for the life of a state directory, and its position once it is queued.

    Positions order the queue. They differ from numbers where a group first waited in its environment's buffer.
    """

    number: int
    position: int | None
    group: ScoredGroup


@dataclass(slots=True)
class Batch:
    """Groups that left the queue together. ``owner`` and ``deadline`` are set while an answer is awaited."""

    id: int
    groups: tuple[HeldGroup, ...]
    deliveries: int = 0
    owner: int | None = None
    deadline: float = 0.0

    @property
    def sequences(self) -> int:
        return sum(held.group.sequences for held in self.groups)


@dataclass(frozen=True, slots=True)
class Change:
    """What one request changed, for the store: all of it becomes durable, or none.

    ``batched`` maps group numbers to the batch that they are out with; None is back in the queue. ``summary`` is
    the small rest of the state, whole. ``receipt`` is the idempotency key of a post with its reply.
    """

    added: tuple[HeldGroup, ...] = ()
    placed: tuple[tuple[int, int], ...] = ()
    batched: tuple[tuple[int, int | None], ...] = ()
    removed: tuple[int, ...] = ()
    receipt: tuple[str, bytes] | None = None
    summary: Mapping[str, Any] | None = None
    wipe: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a store holds: what a restarted server begins with."""

    held: tuple[HeldGroup, ...]
    batch_of: Mapping[int, int]
    receipts: Mapping[str, bytes]
    summary: Mapping[str, Any]
