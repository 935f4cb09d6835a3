"""Process groups that the ranks of a job create once they have met (:mod:`~lachesis.train.distributed.job`).

A model's tensors travel in the default group. In the control group, a second one that uses gloo, rank 0 announces its
turns. It is not registered with torch, because aborting NCCL's collectives ends all registered groups, and this one
must survive to name the lost rank. It has practically no timeout, because rank 0 may generate for hours between two
turns; gloo reports the death of a process at once, by the closed connection.

Messages are bytes of our codec (:mod:`~lachesis.train.distributed.messages`). ``dist.broadcast_object_list`` uses
pickle, which executes its input. gloo does not authenticate connections, so the ranks of a group first prove to one
another that they belong to the job.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded, TrainingError, first_line
from lachesis.common.world import World
from lachesis.train.distributed.job import LOOPBACK, on_loopback, prove, seal, unseal
from lachesis.train.distributed.messages import decode, encode

_LONG = timedelta(days=30)
# A message's length and its first bytes travel together, so most messages are sent in one piece.
_FRAME_BYTES = 2048
_LENGTH_BYTES = 8


def rank_device(world: World, *, wanted: str) -> torch.device:
    """Return the device of this rank and make it the current one; ``wanted`` is ``model.device``.

    Raises:
        ConfigError: there are more ranks on this node than GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if world.local_rank >= count:
        raise ConfigError(
            f"rank {world.rank} needs GPU number {world.local_rank} of this node, which has only {count} GPUs",
            remedy=f"start at most {count} processes per node, or set model.device: cpu",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def init_process_group(world: World, store: Store, *, device: torch.device, limit_s: float, secret: str = "") -> None:
    """Create the default process group of all ranks; every collective has ``limit_s`` seconds.

    Raises:
        DeadlineExceeded: not all came in time.
        TrainingError: one of them does not have the job's secret.
    """
    with on_loopback(wanted=world.one_machine):
        _join_default_group(world, store, device=device, limit_s=limit_s)
    group = c10d._get_default_group()._get_backend(torch.device("cpu"))
    prove(group, rank=world.rank, size=world.size, secret=secret, limit_s=limit_s, name="rank {}".format)


def _join_default_group(world: World, store: Store, *, device: torch.device, limit_s: float) -> None:
    try:
        # No device_id, by which torch 2.11 splits this group for a mesh of several dimensions: it crashes there in a
        # process that has a gloo group outside of the registry, as the control group is. NCCL takes the current device.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("tensors", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=limit_s),
        )
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"rank {world.rank} of {world.size} could not join the others: {first_line(error)}",
            remedy="check that all ranks are still running, and that the network connects them",
        ) from error


@contextmanager
def destroying_process_group() -> Iterator[None]:
    """Destroy the default process group after the block, if there is one.

    After an error this does not wait for other ranks.
    """
    try:
        yield
    except BaseException:
        abort_collectives()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_collectives() -> None:
    """Abort collectives on GPUs that wait for a lost rank; those on CPUs end by themselves."""
    if dist.is_initialized() and torch.cuda.is_initialized():
        c10d._abort_process_group()


class Gone(TrainingError):
    """Error for a rank that has ended, or whose connection was lost."""


class Tag(IntEnum):
    """Tag of a message from one rank to another, so that threads can wait for different ones."""

    PART = 1
    ANSWER = 2
    LIFE = 3
    BUCKET = 4


class ControlGroup:
    """Control group of all ranks; the constructor returns once all have joined.

    Args:
        world: this process among them.
        store: of this attempt.
        limit_s: how long ranks wait for one another; followers adopt rank 0's.
        secret: of the job; each rank proves to every other that it knows it.

    Raises:
        DeadlineExceeded: not all came in time.
        TrainingError: one of them does not have the secret.
    """

    def __init__(self, world: World, store: Store, *, limit_s: float, secret: str = "") -> None:
        self.rank = world.rank
        self.size = world.size
        identity = f"process {os.getpid()} on {socket.gethostname()}"
        key = f"rank/{self.rank}"
        store.set(key, seal(secret, key, json.dumps([identity, limit_s])))
        self._secret = secret
        identity, self.limit_s = self._await(0, store, limit_s=limit_s)
        self._names = [f"the leader, rank 0 ({identity}),"]
        for rank in range(1, self.size):
            self._names.append(f"rank {rank} ({self._await(rank, store, limit_s=self.limit_s)[0]})")
        self._group: Any = _control_group(world, PrefixStore("control", store))
        proof = {"rank": self.rank, "size": self.size, "secret": secret, "limit_s": self.limit_s}
        prove(self._group, **proof, name=self.name)

    def name(self, rank: int) -> str:
        """Return a rank with its process and machine, for messages."""
        return self._names[rank]

    def broadcast(self, message: Any = None) -> Any:
        """Return rank 0's message on all ranks.

        Raises gloo's RuntimeError if one of them is gone.
        """

        def move(data: Tensor) -> None:
            self._group.broadcast(data, 0).wait()

        if self.rank == 0:
            _write(message, move)
            return message
        return _read(move)

    def send(self, message: Any, *, to: int, tag: Tag) -> None:
        """Send a message to a rank. Raises Gone if the rank has ended."""
        try:
            _write(message, lambda data: self._group.send([data], to, tag).wait())
        except RuntimeError as error:
            raise self._gone(to) from error

    def receive(self, source: int, *, tag: Tag, deadline: Deadline | None = None) -> Any:
        """Return the next message of a rank, waiting without limit unless there is a deadline.

        Raises:
            Gone: none will come.
            DeadlineExceeded: none came in time.
            TrainingError: the bytes are not one of our messages.
        """

        def move(data: Tensor) -> None:
            left = None if deadline is None else deadline.remaining_s()
            # Gloo counts whole milliseconds: one too few would end before the deadline, as if the rank were gone.
            limit = _LONG if left is None else timedelta(milliseconds=math.ceil(1000 * left) + 1)
            self._group.recv([data], source, tag).wait(limit)

        try:
            return _read(move)
        except RuntimeError as error:
            if deadline is not None:
                deadline.check()
            raise self._gone(source) from error

    def _await(self, rank: int, store: Store, *, limit_s: float) -> Any:
        deadline = Deadline(f"rank {self.rank} waiting for rank {rank} of {self.size}", limit_s, "deadlines.ranks_s")
        key = f"rank/{rank}"
        try:
            with deadline.waiting():
                store.wait([key], timedelta(seconds=limit_s))
                return json.loads(unseal(self._secret, key, store.get(key).decode()))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank {self.rank} heard nothing from rank {rank} of {self.size} for {limit_s:g} s, or torchrun ended",
                remedy="look at that rank's output; rank 0 reads the configuration before it joins the others",
            ) from error

    def _gone(self, rank: int) -> Gone:
        return Gone(f"{self.name(rank)} ended without reporting an error", remedy="read its last output or its log")


def _control_group(world: World, store: Store) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _LONG
    options._devices = [gloo.create_device(hostname=LOOPBACK) if world.one_machine else gloo.create_default_device()]
    return gloo(store, world.rank, world.size, options)


def _write(message: Any, move: Callable[[Tensor], object]) -> None:
    data = encode(message)
    framed = torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH_BYTES, "big") + data), dtype=torch.uint8)
    move(torch.nn.functional.pad(framed, (0, max(0, _FRAME_BYTES - framed.numel())))[:_FRAME_BYTES])
    if framed.numel() > _FRAME_BYTES:
        move(framed[_FRAME_BYTES:])


def _read(move: Callable[[Tensor], object]) -> Any:
    frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
    move(frame)
    end = _LENGTH_BYTES + int.from_bytes(bytes(frame[:_LENGTH_BYTES].tolist()), "big")
    rest = torch.empty(max(0, end - _FRAME_BYTES), dtype=torch.uint8)
    if rest.numel():
        move(rest)
    return decode(torch.cat([frame, rest])[_LENGTH_BYTES:end].numpy().tobytes())
