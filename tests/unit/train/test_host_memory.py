"""Memory for copies is taken once, in a thread, and let go for the copies."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor

from lachesis.train.host_memory import HostMemory, is_pinned_when_copied
from tests.waiting import LONG_S


class Machine:
    """Has memory when it is let go on; what is held of it is counted."""

    def __init__(self, *, breaks_at: int | None = None) -> None:
        self.taken: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.held = 0
        self.go_on = threading.Event()
        self._breaks_at = breaks_at

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> object:
        assert self.go_on.wait(LONG_S)
        if len(self.taken) == self._breaks_at:
            raise RuntimeError("CUDA error: out of memory")
        self.taken.append((tuple(shape), dtype))
        self.held += 1
        machine = self

        class Block:
            def __del__(self) -> None:
                machine.held -= 1

        return Block()


def on_a_gpu(tensor: Tensor) -> bool:
    return tensor.is_meta


TENSORS = [
    torch.empty(3, 4, device="meta"),
    torch.empty(5, dtype=torch.bfloat16, device="meta"),
    torch.empty(2),  # on the host already
]


def test_it_is_taken_in_a_thread_once_and_waited_for():
    machine = Machine()
    memory = HostMemory(allocate=machine.allocate, wanted=on_a_gpu)
    memory.wait()
    memory.reserve(TENSORS)
    assert not memory._there.is_set() and not machine.taken, "whoever asked for it goes on"
    machine.go_on.set()
    memory.wait()
    assert machine.taken == [((3, 4), torch.float32), ((5,), torch.bfloat16)]
    assert memory._there.is_set() and machine.held == 0, "it is there for the copies"
    memory.reserve(TENSORS)
    memory.wait()
    assert len(machine.taken) == 2


def test_where_it_cannot_be_had_a_run_goes_on_and_says_so(caplog: pytest.LogCaptureFixture):
    machine = Machine(breaks_at=1)
    machine.go_on.set()
    memory = HostMemory(allocate=machine.allocate, wanted=on_a_gpu)
    with caplog.at_level(logging.WARNING):
        memory.reserve(TENSORS)
        memory.wait()
    assert "could not be allocated in advance: CUDA error: out of memory" in caplog.text
    assert machine.held == 0


def test_on_a_cpu_nothing_is_taken():
    machine = Machine()
    memory = HostMemory(allocate=machine.allocate)
    memory.reserve([torch.empty(2)])
    memory.wait()
    assert not machine.taken and not is_pinned_when_copied(torch.empty(2))
