"""How ranks find one another through torchrun's store, and the process group in which a model's tensors travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from lachesis.common.errors import ConfigError, DeadlineExceeded, first_line
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


def job_store(world: World, *, limit_s: float) -> c10d.Store:
    """The store of the whole torchrun job. It outlives ranks: what an attempt has set, those after it find.

    Raises:
        DeadlineExceeded: it was not there in time.
    """
    try:
        store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=limit_s))))
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"rank {world.rank} of {world.size} did not reach the store of torchrun: {first_line(error)}",
            remedy=f"start all ranks with {HOW_TO_START}",
        ) from error
    return store


def attempt_store(world: World, store: c10d.Store) -> c10d.Store:
    """The part of the job's store for this attempt: after a restart the addresses of the one before are dead."""
    return c10d.PrefixStore(f"lachesis/attempt/{world.restarts}", store)


def init_process_group(world: World, store: c10d.Store, *, device: torch.device, limit_s: float) -> None:
    """Make the default process group, of all ranks; every collective has ``limit_s`` seconds.

    Raises:
        DeadlineExceeded: not all came in time.
    """
    try:
        # No device_id, by which torch 2.11 splits this group for a mesh of several dimensions: it crashes there in a
        # process that has a gloo group outside of the registry, as the control group is. NCCL takes the current device.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=c10d.PrefixStore("tensors", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=limit_s),
        )
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"rank {world.rank} of {world.size} could not join the others: {first_line(error)}",
            remedy="see whether one of them has ended, and whether the network lets them talk",
        ) from error


@contextmanager
def destroying_process_group() -> Iterator[None]:
    """Destroy the default process group afterwards, where it was made; after an error without waiting for others."""
    try:
        yield
    except BaseException:
        abort_collectives()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_collectives() -> None:
    """End collectives on GPUs that wait for a rank that is gone; those on CPUs end by themselves."""
    if dist.is_initialized() and torch.cuda.is_initialized():
        c10d._abort_process_group()
