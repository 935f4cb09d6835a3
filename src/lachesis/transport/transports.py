"""Transports, which move a bucket of bytes from the trainer to the engine's workers: a collective, or shared memory."""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError, first_line
from lachesis.process.threads import call_aside, call_watched
from lachesis.transport.layout import WINDOW, Bucket
from lachesis.transport.rendezvous import Links, Message
from lachesis.transport.shared_tensors import (
    Attachments,
    CudaStorage,
    SharedFile,
    SharedTensor,
    create_file,
    export_cuda,
    export_from_file,
    gpu_uuid,
)

# Seconds between two checks of work on a GPU. Waiting for messages meanwhile would round it up to a millisecond.
_POLL_S = 0.0001
# The same on a CPU, whose cores the work itself needs.
_CPU_POLL_S = 0.001
# Buckets under way over gloo: one is packed while the one before is sent, by the same cores.
GLOO_WINDOW = 2
_NEWS_S = 0.5
# The limit of torch's own timers, so long that ours come first: torch's act late and, with NCCL, differently.
_LONG = timedelta(days=30)
# torch.distributed exports no types for names from its C++ part.
_c10d: Any = dist


class Partners(Protocol):
    """Other ranks of the trainer, each of which may also pack every bucket in its device's memory."""

    def begin(self) -> None:
        """Have the partners pack the next bucket; the bucket that lay at its place in their rings has been taken."""
        ...

    def packed(self) -> Sequence[Message]:
        """Wait until all partners have packed the bucket, and return where their rings are, in the order of ranks.

        Empty if that is already known.
        """
        ...


class NoPartners:
    """Partners of a trainer that sends from one rank alone."""

    def begin(self) -> None:
        """Do nothing."""

    def packed(self) -> Sequence[Message]:
        return ()


class Transport(ABC):
    """Mover of buckets from rank 0 to all others, in order, several under way. ``device`` is where its ring is.

    ``read_rank`` is the trainer's rank whose bytes this side receives, ``window`` the number of buckets in flight.
    """

    read_rank = 0
    window = WINDOW

    def __init__(self, *, device: torch.device, links: Links) -> None:
        self.device = device
        self._links = links
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @abstractmethod
    def ring(self, num_bytes: int) -> Tensor:
        """Return memory (rank 0) into which to pack the buckets of an update."""

    def announcement(self, others: Sequence[Message] = ()) -> Message:
        """Return what the workers must know to receive the bucket that was packed last (rank 0).

        ``others`` are the rings of further trainer ranks with the same contents.
        """
        return {}

    @abstractmethod
    def send(self, bucket: Tensor, *, deadline: Deadline) -> Callable[[], None]:
        """Begin to send part of the ring (rank 0); call the result before that part is written to again.

        Both raise EngineError or DeadlineExceeded.
        """

    @abstractmethod
    def receive(
        self, bucket: Bucket, *, ring: int, announcement: Message, keep: torch.device | None, deadline: Deadline
    ) -> Tensor:
        """Return the bytes of the bucket (other ranks), as work on the current stream sees them.

        With ``keep`` the caller owns them, on that device; otherwise they lie in a ring of ``ring`` bytes until the
        trainer is told that they were taken.
        """

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark of the current stream's work, for :meth:`finish`."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finish(self, mark: torch.cuda.Event | None, *, deadline: Deadline) -> None:
        """Return when the work before the mark is done.

        Peers are watched meanwhile, because a collective with a dead peer never ends.
        """
        while mark is not None and not mark.query():
            self._look("the GPU is still busy with a bucket of weights", deadline)

    @abstractmethod
    def let_go(self) -> None:
        """Release memory between updates that the next update can allocate again."""

    def _look(self, waiting_for: str, deadline: Deadline) -> None:
        on_gpu = self.device.type == "cuda"
        self._links.watch(0.0 if on_gpu else _CPU_POLL_S)
        deadline.check(waiting_for)
        if on_gpu:
            time.sleep(_POLL_S)

    @abstractmethod
    def abort(self) -> None:
        """Abort all transfers in flight without waiting."""

    @abstractmethod
    def close(self) -> None:
        """Close the transport. Idempotent."""


class Collective(Transport):
    """Transport by broadcasts over a separate gloo or NCCL process group."""

    def __init__(self, group: Any, *, device: torch.device, links: Links) -> None:
        super().__init__(device=device, links=links)
        self.window = WINDOW if device.type == "cuda" else GLOO_WINDOW
        self._group: Any = group

    def ring(self, num_bytes: int) -> Tensor:
        if self._buffer.numel() < num_bytes:
            self.let_go()  # the old one goes first
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def receive(
        self, bucket: Bucket, *, ring: int, announcement: Message, keep: torch.device | None, deadline: Deadline
    ) -> Tensor:
        if keep == self.device:
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=keep)
        else:
            buffer = self.ring(ring)[bucket.place : bucket.place + bucket.num_bytes]
        self.send(buffer, deadline=deadline)()
        return buffer if keep in (None, self.device) else own_copy(buffer, keep)

    def let_go(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    def abort(self) -> None:
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        self.abort()
        held, self._group = [self._group], None
        if self.device.type != "cuda":
            # When deleted, a gloo group waits for its operations in flight until the other side has gone: maybe long.
            call_aside(held.clear, name="lachesis-channel-end")
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def send(self, bucket: Tensor, *, deadline: Deadline) -> Callable[[], None]:
        """Begin a broadcast; the result ends it.

        On a GPU only the current stream waits for its end, not this thread.
        """
        if bucket.numel() == 0:
            return lambda: None
        group = self._group
        if group is None:
            raise EngineError("the weight channel was closed")
        with _current(self.device), self._explained(deadline):
            work = group.broadcast([bucket], _from_trainer(deadline))

        def finish() -> None:
            with _current(self.device), self._explained(deadline):
                while self.device.type != "cuda" and not work.is_completed():
                    self._look("a broadcast of weights is under way", deadline)
                work.wait()

        return finish

    @contextmanager
    def _explained(self, deadline: Deadline) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            heard = Deadline("news of a peer's end", _NEWS_S)
            while heard.remaining_s():
                self._links.watch(_NEWS_S / 10)  # raises an error that names the lost peer, which says more than ours
            deadline.check()
            raise EngineError(
                f"the broadcast of weights failed: {first_line(error)}", remedy="read the log of the other side"
            ) from error


def own_copy(source: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, as work on the current stream sees it.

    A copy from a GPU to the host is in pinned memory, which torch keeps for the next update: newly mapped memory takes
    many times as long as the copy. Raises as :func:`pinned`.
    """
    if source.is_cuda and device.type == "cpu":
        return pinned(source.shape, dtype=source.dtype).copy_(source, non_blocking=True)
    return source.to(device, copy=True)


def pinned(shape: torch.Size, *, dtype: torch.dtype) -> Tensor:
    """Allocate host memory that a GPU copies to at full speed.

    Raises EngineError if there is not enough.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise EngineError(
            f"no pinned host memory can be allocated for a weight update: {first_line(error)}",
            remedy="give the engine's machine or container as much free memory as the model takes, or leave room for "
            "the update on its GPU (engine.gpu_memory_utilization)",
        ) from error


class SharedRoom:
    """Allocation that other processes on the same device read in place; on the CPU it is shared memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._file: SharedFile | None = None
        self._untold: Message | None = None

    def bytes(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` bytes, in new memory if the allocation is smaller."""
        if self._bytes.numel() < num_bytes:
            self._untold = self._allocate(num_bytes).to_json()
        return self._bytes[:num_bytes]

    def packed(self) -> Message:
        """Return where others find the written bytes; empty if they know the place already."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        untold, self._untold = self._untold, None
        return untold or {}

    def close(self) -> None:
        """Release the memory; mappings of others stay until they release it too. Idempotent."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._file is not None:
            self._file.close()

    def _allocate(self, num_bytes: int) -> SharedTensor:
        self.close()
        if self._device.type == "cuda":
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return export_cuda(self._bytes)
        self._file = file = create_file(num_bytes)
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(file.storage, 0, (num_bytes,), (1,))
        return export_from_file(self._bytes, file)


class SharedBuffer(Transport):
    """Transport through the trainer's memory, which engine workers on the same device read in place.

    NCCL refuses two ranks on one device; this needs no copy beyond packing. If each trainer rank packs, a worker reads
    the buffer of the rank on its own GPU, or on the CPU of the rank with its own number.
    """

    def __init__(self, *, rank: int, device: torch.device, links: Links) -> None:
        super().__init__(device=device, links=links)
        self.read_rank = 0
        self._rank = rank
        self._room = SharedRoom(device)
        self._attachments = Attachments()

    def ring(self, num_bytes: int) -> Tensor:
        return self._room.bytes(num_bytes)

    def announcement(self, others: Sequence[Message] = ()) -> Message:
        # The others may read as soon as they hear of it, so packing has to be done.
        shared = self._room.packed()
        return {"shared": [shared, *others]} if shared else {}

    def send(self, bucket: Tensor, *, deadline: Deadline) -> Callable[[], None]:
        """Return at once, because there is nothing to send besides the announcement."""
        return lambda: None

    def receive(
        self, bucket: Bucket, *, ring: int, announcement: Message, keep: torch.device | None, deadline: Deadline
    ) -> Tensor:
        if "shared" in announcement:
            offered = [SharedTensor.from_json("the channel's buffer", entry) for entry in announcement["shared"]]
            self.read_rank = self._nearest(offered)
            self._attachments.close()  # unmaps the previous buffer once its last view is gone
            self._buffer = self._attachments.tensor("the channel's buffer", offered[self.read_rank])
        if self._buffer.numel() < ring:
            raise EngineError(f"the trainer shares {self._buffer.numel()} bytes, but an update needs {ring}")
        shown = self._buffer[bucket.place : bucket.place + bucket.num_bytes]
        return shown if keep is None else own_copy(shown, keep)

    def let_go(self) -> None:
        """Keep the memory, because the others have it mapped and read it at the next update."""

    def abort(self) -> None:
        """Do nothing, because nothing is ever under way."""

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._attachments.close()
        self._room.close()

    def _nearest(self, offered: Sequence[SharedTensor]) -> int:
        """Return the trainer's rank whose buffer this worker reads."""
        if len(offered) == 1:
            return 0
        if self.device.type == "cuda":
            here = gpu_uuid(self.device)
            gpus = [shared.storage.device_uuid for shared in offered if isinstance(shared.storage, CudaStorage)]
        else:
            here, gpus = str(self._rank - 1), [*map(str, range(len(offered)))]
        if here in gpus:
            return gpus.index(here)
        raise EngineError(
            f"a worker of the engine is on GPU {here}, but none of the trainer's {len(offered)} ranks is",
            remedy="leave out engine.devices, so that each worker shares a rank's GPU, or set bridge.transport",
        )


def build_group(
    backend: str, *, rank: int, world_size: int, device: torch.device, links: Links, deadline: Deadline
) -> Any:
    """Create a process group outside torch's registry and try it with one broadcast; all ranks call it together.

    Raises:
        EngineError: a library is missing or refuses, or a peer failed.
        DeadlineExceeded: a peer did not come.
    """
    if backend == "nccl" and not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        raise EngineError(
            "vLLM NCCL setup failed: this side has no NCCL or no GPU", remedy="without GPUs use the gloo transport"
        )
    if rank == 0:
        listener = socket.create_server((links.host, 0))
        host, port = listener.getsockname()[:2]
        links.send({"store": [host, port]})
        descriptor = listener.detach()
    else:
        host, port = links.receive(0, deadline=deadline, waiting_for="the address of its store")["store"]
        descriptor = None

    def build() -> Any:
        store = _c10d.TCPStore(
            host,
            port,
            is_master=rank == 0,
            timeout=_remaining(deadline),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        make = _gloo_group if backend == "gloo" else _nccl_group
        with _current(device):
            group = make(_c10d.PrefixStore("weights", store), rank, world_size, links.host, deadline)
            probe = torch.zeros(1, dtype=torch.uint8, device=device if backend == "nccl" else "cpu")
            group.broadcast([probe], _from_trainer(deadline)).wait()
            if probe.is_cuda:
                torch.cuda.current_stream(device).synchronize()
        return group

    def watch() -> None:
        links.watch(0.0)
        deadline.check("meeting in a process group")

    try:
        return call_watched(build, watch=watch, every_s=0.02)
    except LachesisError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        deadline.check(f"building the {backend} process group")
        raise EngineError(
            f"vLLM NCCL setup failed: no {backend} process group with {world_size} ranks: {first_line(error)}",
            remedy="nccl needs separate GPUs for both sides; use ipc on the same GPU, and gloo without a GPU",
        ) from error


def _gloo_group(store: Any, rank: int, world_size: int, local_host: str, deadline: Deadline) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    # The interface over which the control connection came works; a host's name often resolves to another.
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=local_host)]
    options._timeout = _remaining(deadline)
    options._threads = 1
    return _c10d.ProcessGroupGloo(store, rank, world_size, options)


def _nccl_group(store: Any, rank: int, world_size: int, local_host: str, deadline: Deadline) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _LONG
    # By default torch's threads end the whole process when a peer dies or hangs: the trainer, or the engine. Here
    # the channel reports it. These settings are read when a group is made.
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        return _c10d.ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _environment(**values: str) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _from_trainer(deadline: Deadline) -> Any:
    options = _c10d.BroadcastOptions()
    options.rootRank = 0
    options.timeout = _remaining(deadline)
    return options


def _remaining(deadline: Deadline) -> timedelta:
    remaining = deadline.remaining_s()
    # Never 0, which libraries take for no limit.
    return _LONG if remaining is None else timedelta(seconds=max(remaining, 0.05))
