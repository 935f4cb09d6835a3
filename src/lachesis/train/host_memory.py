"""Copies of a checkpoint in pinned host memory, which is taken beside training.

The first copy would be held up by taking it of the machine, for many times as long as by the copy itself
(benchmarks/RESULTS.md, "What a checkpoint of 8B copies"). torch keeps what was taken once, by sizes, for next copies.
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

# Set when the interpreter ends, which waits some seconds for a call aside.
_ending = threading.Event()
atexit.register(_ending.set)

Allocate = Callable[[torch.Size, torch.dtype], object]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_pinned_when_copied(tensor: Tensor) -> bool:
    """Whether its copy goes to pinned memory: it is on a GPU, and is one piece."""
    return tensor.is_cuda and not is_traceable_wrapper_subclass(tensor)


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU; from a GPU it is on its way until that one is waited for."""
    if is_traceable_wrapper_subclass(tensor):  # quantized: made of several tensors
        return tensor.to("cpu", copy=True)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned_when_copied(tensor))
    return copy.copy_(tensor, non_blocking=True)


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class HostMemory:
    """As much pinned memory as copies of some tensors need, which a thread takes once.

    Args:
        allocate: takes memory for a copy and holds it for as long as its result lives.
        wanted: of which tensors copies need any.
    """

    def __init__(
        self, *, allocate: Allocate = _pinned, wanted: Callable[[Tensor], bool] = is_pinned_when_copied
    ) -> None:
        self._allocate = allocate
        self._wanted = wanted
        self._begun = False
        self._there = threading.Event()
        self._there.set()

    @property
    def there(self) -> bool:
        """Whether nothing is being taken."""
        return self._there.is_set()

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Begin to take what copies of them need; what comes after the first call does nothing."""
        if self._begun:
            return
        self._begun = True
        sizes = [(local.shape, local.dtype) for local in map(local_part, tensors) if self._wanted(local)]
        if sizes:
            self._there.clear()
            call_aside(lambda: self._take(sizes), name="lachesis-host-memory")

    def wait(self) -> None:
        """Return once it is there: a copy that is made before would take it a second time."""
        self._there.wait()

    def _take(self, sizes: list[tuple[torch.Size, torch.dtype]]) -> None:
        held: list[object] = []
        try:
            for shape, dtype in sizes:
                if _ending.is_set():
                    return
                held.append(self._allocate(shape, dtype))
        except RuntimeError as error:  # the copy itself will fail where it cannot be had
            logger.warning("pinned memory for checkpoints could not be taken ahead: %s", first_line(error))
        finally:
            held.clear()  # torch keeps it
            self._there.set()
