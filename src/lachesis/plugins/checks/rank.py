"""A rank that meets another as those of a run do, and adds up: ``python -m lachesis.plugins.checks.rank DEVICE``."""

from __future__ import annotations

import json
import os
import sys

from lachesis.common.errors import ConfigError
from lachesis.common.world import find_world
from lachesis.plugins.checks.all_reduce import all_reduce_s
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
        elements = _ELEMENTS[device.type]
        seconds = all_reduce_s(world, device=device, elements=elements)
    megabytes = elements * 4 / 1e6
    return {"device": device.type, "mb_per_s": megabytes / seconds, "mb": megabytes}


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(meet(sys.argv[1]))}\n")
