"""The group of all ranks, in which torch's collectives run, and the device of each."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lachesis.common.errors import ConfigError, DeadlineExceeded
from lachesis.common.world import HOW_TO_START, World


def rank_device(world: World, *, wanted: str) -> torch.device:
    """The device of this rank, made the current one: ``wanted`` is ``model.device``.

    Raises:
        ConfigError: there are more ranks on this node than GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if world.local_rank >= count:
        raise ConfigError(
            f"rank {world.rank} is to have GPU {world.local_rank} of this node, which has {count}",
            remedy=f"start at most {count} processes a node, or set model.device: cpu",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def meet(world: World, *, limit_s: float) -> dist.Store:
    """The store through which ranks find one another.

    Raises:
        DeadlineExceeded: it was not there in time.
    """
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=limit_s))))
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"rank {world.rank} of {world.size} did not reach the store of torchrun: {_first_line(error)}",
            remedy=f"start all ranks with {HOW_TO_START}",
        ) from error
    return store


def join(world: World, store: dist.Store, *, device: torch.device, limit_s: float) -> None:
    """Make the group of all ranks; every collective has ``limit_s`` seconds.

    Raises:
        DeadlineExceeded: not all came in time.
    """
    gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=dist.PrefixStore("lachesis", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=limit_s),
            device_id=device if gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"rank {world.rank} of {world.size} could not join the others: {_first_line(error)}",
            remedy="see whether one of them has ended, and whether the network lets them talk",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
