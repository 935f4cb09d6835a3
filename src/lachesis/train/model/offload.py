"""Offloading of saved tensors to host memory until the backward pass needs them.

Autograd hands over the tensors it keeps (``saved_tensors_hooks``). On a GPU a separate stream copies them out beside
the computation, and back while the layer above runs backward. So the GPU holds two of them at a time, one in use and
one in transit, however many layers there are. Events on the GPU wait for copies; the host never does.
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
    """Host memory for the saved tensors of one model, which are fetched in reverse order."""

    def __init__(self) -> None:
        self._newest: Callable[[], _Away | None] = _nothing

    def keeping(self) -> saved_tensors_hooks:
        """Store here the tensors that autograd saves within the block."""
        return saved_tensors_hooks(self._take, self._give_back)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        return HostMemory()  # a copied model runs separate passes

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
    """Saved CPU tensor, kept as a copy; ``before`` is the one kept before it, if it still exists."""

    def __init__(self, tensor: Tensor, before: _Away | None) -> None:
        self.before: Callable[[], _Away | None] = _nothing if before is None else weakref.ref(before)
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self._host.copy_(tensor.detach())

    def release(self) -> None:
        """Release the tensor on its device."""

    def fetch(self) -> None:
        """Begin to fetch the tensor, which is needed on its device soon."""

    def arrived(self) -> Tensor:
        """Return the tensor on its device."""
        return self._host


class _AwayFromGpu(_Away):
    """Saved GPU tensor in pinned memory; ``_near`` is its GPU copy before it has left and from fetch to use."""

    def __init__(self, tensor: Tensor, before: _Away | None) -> None:
        super().__init__(tensor, before)
        self._device = tensor.device
        self._near: Tensor | None = tensor.detach()
        self._travelled = _travel(source=self._near, target=self._host, device=self._device)

    def release(self) -> None:
        # The computation may reuse its memory, but only write to it once the whole copy has been made.
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
    """Return None, as a reference to a tensor that never existed."""


def _travel(*, source: Tensor, target: Tensor, device: torch.device) -> torch.cuda.Event:
    """Copy beside the computation, after the work queued by now; return the event of the last byte."""
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
