"""A batch, dealt to ranks by its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

from lachesis.common.types import Group
from lachesis.train.batch import Batch, pack

T = TypeVar("T")


def split(batch: Batch, ranks: int) -> list[Batch]:
    """A batch for each rank: micro-batch i goes to rank i mod ``ranks``.

    Ranks meet at every pass, which takes as long as the largest of its micro-batches. They are packed from the
    largest to the smallest, so that dealing them in order brings equals together. The counts of the step stay with
    rank 0: over all ranks they add up to what they were. Groups are no business of a policy.
    """
    parts = [
        replace(batch, groups=(), micro_batches=micro_batches, num_sequences=0, num_tokens=0, skipped_sequences=0)
        for micro_batches in deal(batch.micro_batches, ranks)
    ]
    whole = {name: getattr(batch, name) for name in ("groups", "num_sequences", "num_tokens", "skipped_sequences")}
    return [replace(parts[0], **whole), *parts[1:]]


def deal(items: Sequence[T], ranks: int) -> list[tuple[T, ...]]:
    """Item i to rank i mod ``ranks``."""
    return [tuple(items[rank::ranks]) for rank in range(ranks)]


def collect(parts: Sequence[Sequence[T]]) -> list[T]:
    """The reverse of :func:`deal`."""
    missing = object()
    rounds = zip_longest(*parts, fillvalue=missing)
    return [item for items in rounds for item in items if item is not missing]  # type: ignore[misc]


def pack_for_ranks(groups: Sequence[Group], *, ranks: int, max_tokens: int, **options: Any) -> Batch:
    """As :func:`pack`, in micro-batches that keep all ranks busy.

    One that holds all that a device may take at once leaves others idle where there is no second one. So smaller ones
    are tried too, as many as make full passes, and taken where the passes are shorter then.
    """
    batch = pack(groups, max_tokens=max_tokens, **options)
    if ranks == 1 or not batch.micro_batches:
        return batch
    passes = -(-len(batch.micro_batches) // ranks)
    total = sum(micro.num_inputs for micro in batch.micro_batches)
    even = pack(groups, max_tokens=min(max_tokens, -(-total // (passes * ranks))), **options)
    return min((batch, even), key=lambda packed: passes_cost(packed, ranks))


def passes_cost(batch: Batch, ranks: int) -> int:
    """Tokens that the passes of a split batch take time for: the largest micro-batch of each pass."""
    sizes = [micro.num_inputs for micro in batch.micro_batches]
    return sum(max(sizes[start : start + ranks]) for start in range(0, len(sizes), ranks))
