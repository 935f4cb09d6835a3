"""Packing by several ranks of a trainer: each packs every bucket on its own device, where an engine's worker reads it.

Rank 0 talks to the engine over a channel; it tells each partner when to pack the next bucket, and is told where that
lies. So an update crosses from one GPU to another once, when the trainer's ranks gather it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lachesis.common.errors import EngineError
from lachesis.transport.channel import pack
from lachesis.transport.layout import WINDOW, ReceivedTensor, plan_buckets, ring_bytes
from lachesis.transport.rendezvous import Message
from lachesis.transport.transports import Partners, SharedRoom

# Sends the tensors of an update, while partners pack the same buckets.
SendPacked = Callable[[Iterator[tuple[str, Tensor]], Partners], object]
# Rank 0's message before a bucket: pack it now, or stop because no more buckets come.
PACK, STOP = "pack", "stop"


class Line(Protocol):
    """Connection between rank 0 and its partners; failures raise the connection's own error."""

    def tell(self, message: Any) -> None:
        """Send a message to all partners, or to rank 0."""
        ...

    def hear(self) -> Sequence[Any]:
        """Return the next message of each partner in the order of ranks, or of rank 0 alone."""
        ...


@dataclass(slots=True)
class PartnerLine:
    """Side of rank 0 in packing one update, as :class:`~lachesis.transport.transports.Partners`."""

    line: Line
    left: int
    """Number of buckets not yet announced to the partners."""

    def begin(self) -> None:
        self.left -= 1
        self.line.tell(PACK)

    def packed(self) -> Sequence[Message]:
        return [place for place in self.line.hear() if place]

    def stop(self) -> None:
        """Tell the partners that no more buckets come, if they expect any."""
        if self.left > 0:
            self.left = 0
            self.line.tell(STOP)


@torch.no_grad()
def pack_beside(
    tensors: Iterable[tuple[str, Tensor]],
    specs: Sequence[ReceivedTensor],
    *,
    bucket_bytes: int,
    room: SharedRoom,
    line: Line,
    window: int = WINDOW,
) -> None:
    """Pack each bucket into ``room`` when rank 0 says so, and report where it is: a partner's part of one update.

    Args:
        tensors: as rank 0 sends them, in the order of ``specs``.
        bucket_bytes, window: as :meth:`Channel.send` takes them on rank 0.
        room: memory of this rank.
        line: connection to rank 0.

    Raises:
        EngineError: ``tensors`` are not those of ``specs``, or ``room`` cannot be shared.
    """
    buckets = plan_buckets(specs, limit_bytes=bucket_bytes, window=window)
    size = ring_bytes(buckets)
    source = iter(tensors)
    for bucket in buckets:
        (word,) = line.hear()
        if word == STOP:
            deque(source, maxlen=0)  # gathering takes all ranks
            return
        pack(room.bytes(size)[bucket.place : bucket.place + bucket.num_bytes], bucket, source)
        line.tell(room.packed())
    if (extra := next(source, None)) is not None:
        raise EngineError(f"the tensor {extra[0]!r} follows, but it is not in the announced list of tensors")
