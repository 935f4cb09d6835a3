"""What moves a bucket of bytes from the trainer to the engine's workers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.transport.rendezvous import Links, Message

POLL_S = 0.001


class Transport(ABC):
    """Moves one bucket at a time from rank 0 to all others. ``device`` is where its buffers are."""

    device: torch.device

    @abstractmethod
    def buffer(self, num_bytes: int) -> Tensor:
        """Rank 0: bytes to pack the next bucket into; whatever they held has been taken by the others."""

    def announcement(self) -> Message:
        """Rank 0: what the others must know to receive the buffer that was handed out last."""
        return {}

    @abstractmethod
    def send(self, buffer: Tensor, *, deadline: Deadline) -> None:
        """Rank 0: returns when ``buffer`` has been sent. Raises EngineError or DeadlineExceeded."""

    @abstractmethod
    def receive(self, num_bytes: int, *, announcement: Message, deadline: Deadline) -> Tensor:
        """Other ranks: the bytes of the bucket; valid until :meth:`finish_reading`."""

    @abstractmethod
    def finish_reading(self, *, deadline: Deadline) -> None:
        """Other ranks: return when all work on the current stream that reads the bucket is done."""

    @abstractmethod
    def abort(self) -> None:
        """Give up what is under way, without waiting for anybody."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


def finish_stream(device: torch.device, *, links: Links, deadline: Deadline) -> None:
    """Wait for the current stream of ``device``, watching peers and deadline: a dead peer's collective never ends."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        links.watch(POLL_S)
        deadline.check("the GPU is still busy with a bucket of weights")
