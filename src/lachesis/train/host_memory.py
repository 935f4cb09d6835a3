"""Pinned host memory for copies of a checkpoint, allocated beside training.

Otherwise the first copy would wait for the allocation, which takes many times as long as the copy itself
(benchmarks/RESULTS.md, "What a checkpoint of 8B copies"). torch keeps allocations, by size, for later copies.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lachesis.common.errors import first_line
from lachesis.process.threads import call_aside

logger = logging.getLogger(__name__)

# Set when the interpreter ends, which waits some seconds for a call in another thread.
_ending = threading.Event()
atexit.register(_ending.set)

Allocate = Callable[[torch.Size, torch.dtype], object]


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_pinned_when_copied(tensor: Tensor) -> bool:
    """Return True if the tensor's copy goes to pinned memory: it is on a GPU, and contiguous in one piece."""
    return tensor.is_cuda and not is_traceable_wrapper_subclass(tensor)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU; a copy from a GPU is complete after synchronizing with it."""
    if is_traceable_wrapper_subclass(tensor):  # quantized: made of several tensors
        return tensor.to("cpu", copy=True)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned_when_copied(tensor))
    return copy.copy_(tensor, non_blocking=True)


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class HostMemory:
    """Pinned memory for copies of some tensors, allocated once by a thread.

    Args:
        allocate: allocates memory for a copy, and holds it as long as the result lives.
        wanted: selects the tensors whose copies need memory.
    """

    def __init__(
        self, *, allocate: Allocate = _pinned, wanted: Callable[[Tensor], bool] = is_pinned_when_copied
    ) -> None:
        self._allocate = allocate
        self._wanted = wanted
        self._begun = False
        self._there = threading.Event()
        self._there.set()

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Begin to allocate memory for copies of the tensors; calls after the first do nothing."""
        if self._begun:
            return
        self._begun = True
        sizes = [(local.shape, local.dtype) for local in map(local_part, tensors) if self._wanted(local)]
        if sizes:
            self._there.clear()
            call_aside(lambda: self._take(sizes), name="lachesis-host-memory")

    def wait(self) -> None:
        """Wait for the allocation, because an earlier copy would allocate a second time."""
        self._there.wait()

    def _take(self, sizes: list[tuple[torch.Size, torch.dtype]]) -> None:
        held: list[object] = []
        try:
            for shape, dtype in sizes:
                if _ending.is_set():
                    return
                held.append(self._allocate(shape, dtype))
        except RuntimeError as error:  # the copy itself will fail if there is not enough
            logger.warning("pinned memory for checkpoints could not be allocated in advance: %s", first_line(error))
        finally:
            held.clear()  # torch keeps it
            self._there.set()
