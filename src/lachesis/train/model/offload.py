"""Tensors that wait for the backward pass in the host's memory.

Autograd hands over what it is to keep (``saved_tensors_hooks``). On a GPU it leaves by a stream of its own, beside the
computation, and comes back by it while the layer above runs backward. So the GPU holds two of them at a time, the one
in use and the one that travels, however many layers there are. What travels is waited for on the GPU, by events, never
by the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostMemory:
    """Where the tensors of one model wait. They are asked for in the reverse of the order in which they came."""

    def __init__(self) -> None:
        self._newest: Callable[[], _Away | None] = _nothing

    def keeping(self) -> saved_tensors_hooks:
        """What autograd saves within this block waits here."""
        return saved_tensors_hooks(self._take, self._give_back)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        return HostMemory()  # a copied model has passes of its own

    def _take(self, tensor: Tensor) -> _Away:
        before = self._newest()
        away = (_AwayFromGpu if tensor.is_cuda else _Away)(tensor, before)
        if before is not None:
            before.release()
        # Autograd's graph keeps them, as long as there is one.
        self._newest = weakref.ref(away)
        return away

    def _give_back(self, away: _Away) -> Tensor:
        found = away.arrived()
        before = away.before()
        if before is not None:
            before.fetch()
        return found


class _Away:
    """A tensor of a CPU, of which a copy is kept; ``before`` is the one that was kept before it, while there is one."""

    def __init__(self, tensor: Tensor, before: _Away | None) -> None:
        self.before: Callable[[], _Away | None] = _nothing if before is None else weakref.ref(before)
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self._host.copy_(tensor.detach())

    def release(self) -> None:
        """The tensor is no longer needed on its device."""

    def fetch(self) -> None:
        """It will be needed there soon."""

    def arrived(self) -> Tensor:
        """The tensor, on its device."""
        return self._host


class _AwayFromGpu(_Away):
    """One of a GPU, in pinned memory; ``_near`` is it on the GPU: until it has left, and from the fetch to its use."""

    def __init__(self, tensor: Tensor, before: _Away | None) -> None:
        super().__init__(tensor, before)
        self._device = tensor.device
        self._near: Tensor | None = tensor.detach()
        self._travelled = _travel(source=self._near, target=self._host, device=self._device)

    def release(self) -> None:
        # Its memory is the computation's again, which is to write to it when all of it has travelled.
        torch.cuda.current_stream(self._device).wait_event(self._travelled)
        self._near = None

    def fetch(self) -> None:
        if self._near is None:
            self._near = torch.empty_like(self._host, device=self._device)
            self._travelled = _travel(source=self._host, target=self._near, device=self._device)

    def arrived(self) -> Tensor:
        self.fetch()
        assert self._near is not None, "it was fetched a moment ago"
        near = self._near
        self.release()
        return near


def _nothing() -> None:
    """What a reference to a tensor says that there never was."""


def _travel(*, source: Tensor, target: Tensor, device: torch.device) -> torch.cuda.Event:
    """Copy beside the computation, after what of it is queued by now; the event is that of the last byte."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    travelled = torch.cuda.Event()
    travelled.record(stream)
    return travelled


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
