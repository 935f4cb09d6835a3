"""Slots: one number that bounds how far generation may run ahead of training."""

from __future__ import annotations

import threading

from lachesis.common.deadline import Deadline


class Slots:
    """A batch holds a slot from the start of its generation until the step that trained on it is done.

    With one slot generation and training alternate and every sample is on-policy; with ``1 + d`` slots ``d``
    batches may be under way while one is trained, and no sample is older than ``d`` versions.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._taken = 0
        self._free = threading.Condition()

    @property
    def taken(self) -> int:
        """Slots held now."""
        with self._free:
            return self._taken

    def acquire(self, *, deadline: Deadline) -> None:
        """Take a slot, waiting for one to become free.

        Raises:
            DeadlineExceeded: none did in time.
        """
        with self._free:
            while self._taken >= self.capacity:
                self._free.wait(timeout=deadline.remaining_s())
                if self._taken >= self.capacity:
                    deadline.check(f"all {self.capacity} slots are taken")
            self._taken += 1

    def release(self) -> None:
        """Give a slot back. Raises RuntimeError where none is held: a programming error."""
        with self._free:
            if self._taken == 0:
                raise RuntimeError("released a slot that nobody holds")
            self._taken -= 1
            self._free.notify()

    def release_all(self) -> None:
        """Wake whoever waits for a slot: what holds them ends."""
        with self._free:
            self._taken = 0
            self._free.notify_all()
