"""Pinned memory that was taken ahead is what copies of a checkpoint go to.

PYTHONPATH=src:. python -m pytest tests/gpu/test_host_memory_on_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from lachesis.train.host_memory import HostMemory, host_copy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_copies_take_no_memory_beyond_what_was_taken_ahead():
    tensors = [torch.randn(1000, 1000, device="cuda"), torch.randn(3_000_001, device="cuda").bfloat16()]
    memory = HostMemory()
    memory.reserve(tensors)
    memory.wait()
    taken = torch.cuda.host_memory_stats()["num_host_alloc"]
    assert taken >= len(tensors)
    for _ in range(2):
        copies = [host_copy(tensor) for tensor in tensors]
        torch.cuda.synchronize()
        for copy, tensor in zip(copies, tensors, strict=True):
            assert copy.is_pinned() and torch.equal(copy, tensor.cpu())
        assert torch.cuda.host_memory_stats()["num_host_alloc"] == taken
        del copies, copy
