"""How the leader and its followers find one another: through torchrun's store, then by links of their own."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded
from lachesis.common.world import World
from lachesis.train.distributed.links import Address, Link, Listener, connect
from lachesis.train.distributed.team import Team

_KEY = "lachesis/leader"


def open_team(world: World, store: dist.Store, *, limit_s: float) -> Team:
    """The leader's team, once all followers have come.

    Raises:
        DeadlineExceeded: not all came in time.
    """
    host = "127.0.0.1" if world.one_node else os.environ["MASTER_ADDR"]
    listener = Listener(host, everywhere=not world.one_node)
    address = listener.address
    store.set(_KEY, json.dumps([host, address.port, address.token.hex(), socket.gethostname(), os.getpid()]))
    deadline = Deadline(f"the leader waiting for {world.size - 1} followers", limit_s, "deadlines.ranks_s")
    return Team(listener.admit(world.size - 1, deadline=deadline), limit_s=limit_s, abort=abort_collectives)


def reach_leader(world: World, store: dist.Store, *, limit_s: float) -> Link:
    """A follower's link to the leader.

    Raises:
        DeadlineExceeded: the leader was not there in time.
        Gone: it cannot be reached.
    """
    try:
        store.wait([_KEY], timedelta(seconds=limit_s))
        host, port, token, name, pid = json.loads(store.get(_KEY))
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"rank {world.rank} heard nothing of the leader, rank 0, for {limit_s:g} s, or torchrun has ended",
            remedy="see what rank 0 says, which reads the configuration before it meets the others",
        ) from error
    return connect(
        Address(host=host, port=port, token=bytes.fromhex(token)),
        rank=world.rank,
        leader=f"the leader, rank 0 (process {pid} on {name}),",
        deadline=Deadline(f"rank {world.rank} connecting to the leader", limit_s),
    )


@contextmanager
def leaving() -> Iterator[None]:
    """Let go of the group of all ranks afterwards, where it was made; after an error without waiting for others."""
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
        dist.distributed_c10d._abort_process_group()
