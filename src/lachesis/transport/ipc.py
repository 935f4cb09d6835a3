"""Buckets of bytes in memory of one device, which the trainer and the engine's workers both map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.transport.base import Transport, finish_stream
from lachesis.transport.rendezvous import Links, Message
from lachesis.transport.shared_file import SharedFile, create_file
from lachesis.transport.shared_tensors import Attachments, SharedTensor, export_cuda, export_from_file


class SharedBuffer(Transport):
    """One allocation of the trainer's that the engine's workers on the same device read in place.

    NCCL refuses two ranks on one device; this needs no copy beyond packing. On the CPU it is shared memory.
    """

    def __init__(self, *, device: torch.device, links: Links) -> None:
        self.device = device
        self._links = links
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._unannounced: dict[str, Any] | None = None
        self._file: SharedFile | None = None
        self._attachments = Attachments()

    def buffer(self, num_bytes: int) -> Tensor:
        if self._buffer.numel() < num_bytes:
            self._unannounced = self._allocate(num_bytes).to_json()
        return self._buffer[:num_bytes]

    def announcement(self) -> Message:
        # The others may read as soon as they hear of it, so packing has to be done.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        shared, self._unannounced = self._unannounced, None
        return {} if shared is None else {"shared": shared}

    def send(self, buffer: Tensor, *, deadline: Deadline) -> None:
        """Nothing moves: the announcement was all."""

    def receive(self, num_bytes: int, *, announcement: Message, deadline: Deadline) -> Tensor:
        if "shared" in announcement:
            shared = SharedTensor.from_json("the channel's buffer", announcement["shared"])
            self._attachments.close()  # unmaps the buffer before, once its last view is gone
            self._buffer = self._attachments.tensor("the channel's buffer", shared)
        if self._buffer.numel() < num_bytes:
            raise EngineError(f"the trainer shares {self._buffer.numel()} bytes, a bucket has {num_bytes}")
        return self._buffer[:num_bytes]

    def finish_reading(self, *, deadline: Deadline) -> None:
        finish_stream(self.device, links=self._links, deadline=deadline)

    def abort(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._attachments.close()
        if self._file is not None:
            self._file.close()

    def _allocate(self, num_bytes: int) -> SharedTensor:
        if self.device.type == "cuda":
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            return export_cuda(self._buffer)
        if self._file is not None:
            self._file.close()
        self._file = file = create_file(num_bytes)
        self._buffer = torch.empty(0, dtype=torch.uint8).set_(file.storage, 0, (num_bytes,), (1,))
        return export_from_file(self._buffer, file)
