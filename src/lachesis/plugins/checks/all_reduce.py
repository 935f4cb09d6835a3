"""Duration of an all-reduce over ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lachesis.common.errors import TrainingError
from lachesis.common.world import World


def all_reduce_s(world: World, *, device: torch.device, elements: int) -> float:
    """Seconds of an all-reduce of float32 [elements] by the process group of this process.

    It is the second of two, as the first makes the connections.

    Raises:
        TrainingError: the sum is wrong.
    """
    expected, seconds = world.size * (world.size + 1) / 2, 0.0
    numbers = torch.empty(elements, device=device)
    for _ in range(2):
        numbers.fill_(world.rank + 1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(numbers)
        total = numbers.double().mean().item()  # which waits for the sum
        seconds = time.perf_counter() - started
        if total != expected:
            raise TrainingError(f"the sum over {world.size} ranks is {total}, and not {expected}")
    return seconds
