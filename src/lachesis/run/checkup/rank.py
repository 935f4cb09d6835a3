"""A rank that meets another as those of a run do, and adds up: ``python -m lachesis.run.checkup.rank DEVICE``."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from lachesis.common.errors import ConfigError, TrainingError
from lachesis.common.world import find_world
from lachesis.train.distributed.control import destroying_process_group, init_process_group, rank_device
from lachesis.train.distributed.job import join_job

LIMIT_S = 30.0
_ELEMENTS = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}


def meet(wanted: str) -> dict[str, float | str]:
    """Join the other rank, add up tensors of both, and say by what they talk and how fast.

    Raises:
        LachesisError: they do not meet, or the sum is wrong.
    """
    world = find_world(os.environ)
    if world is None:
        raise ConfigError("this is one of two ranks, and it is alone", remedy="run lachesis doctor, which starts both")
    device = rank_device(world, wanted=wanted)
    job = join_job(world, limit_s=LIMIT_S)
    with destroying_process_group():
        init_process_group(world, job.store, device=device, limit_s=LIMIT_S, secret=job.secret)
        numbers = torch.empty(_ELEMENTS[device.type], device=device)
        for _ in range(2):  # the first one makes the connections
            numbers.fill_(world.rank + 1)
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(numbers)
            total = numbers.double().mean().item()  # which waits for the sum
            seconds = time.perf_counter() - started
        expected = world.size * (world.size + 1) / 2
        if total != expected:
            raise TrainingError(f"the sum over {world.size} ranks is {total}, and not {expected}")
    return {"device": device.type, "mb_per_s": numbers.nbytes / seconds / 1e6, "mb": numbers.nbytes / 1e6}


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(meet(sys.argv[1]))}\n")
