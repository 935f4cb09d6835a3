"""Batches on their way: which are out with a trainer that acknowledges, and which come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from lachesis.api.records import RolloutBatch


class Deliveries:
    """Batches that were handed out and may have to be handed out again.

    ``returned`` are batches whose trainer was gone before it had read them; anyone may have them next.
    ``outstanding`` are out with Lachesis's trainer, by id, until it acknowledges them or its time is up.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.returned: deque[RolloutBatch] = deque()
        self.outstanding: dict[int, RolloutBatch] = {}
        self.redelivered = 0

    def hand_out(self, batch: RolloutBatch, *, trainer: int, now: float) -> None:
        """Await an acknowledgement of ``batch`` from ``trainer``."""
        batch.owner = trainer
        batch.deadline = now + self.timeout_s
        batch.deliveries += 1
        self.redelivered += batch.deliveries > 1
        self.outstanding[batch.id] = batch

    def renew(self, ids: Iterable[int], *, trainer: int, now: float) -> None:
        """The trainer says that it still holds these: their time starts anew."""
        for batch_id in ids:
            batch = self.outstanding.get(batch_id)
            if batch is not None and batch.owner == trainer:
                batch.deadline = now + self.timeout_s

    def due(self, *, trainer: int, holds: Collection[int] | None, now: float) -> RolloutBatch | None:
        """The oldest outstanding batch that ``trainer`` should get again.

        Due is what went to an earlier trainer, what was not acknowledged in time, and, where the trainer said
        what it ``holds``, what went to it and never arrived.
        """
        for batch in self.outstanding.values():
            lost = holds is not None and batch.id not in holds
            if batch.owner != trainer or batch.deadline <= now or lost:
                return batch
        return None

    def acknowledge(self, ids: Iterable[int]) -> list[RolloutBatch]:
        """Forget the batches with these ids; those that were outstanding are returned."""
        return [self.outstanding.pop(batch_id) for batch_id in ids if batch_id in self.outstanding]
