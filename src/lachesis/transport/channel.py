"""One-way channel for weights, from a trainer to the workers of an engine.

It has its own process groups and never touches torch's default one, so it can be used beside those of FSDP and vLLM. An
update goes bucket by bucket, several in flight, packed into a ring one after the other::

    trainer                                   each engine worker
    header: update number, tensors    ->      compare with what is expected; accept or refuse
    for each bucket: announce, broadcast ->   hand out its tensors
                                      <-      taken: its place in the ring may be written to again
                                      <-      loaded

Before anything large moves both sides have agreed on it, and each side notices at once if the other fails or dies,
whatever it waits for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError
from lachesis.transport.layout import (
    BUCKET_BYTES,
    Bucket,
    ChannelBackend,
    ReceivedTensor,
    difference,
    plan_buckets,
    ring_bytes,
    to_wire,
)
from lachesis.transport.rendezvous import PROTOCOL, Links, Message, Rendezvous, listen
from lachesis.transport.transports import Collective, NoPartners, Partners, SharedBuffer, Transport, build_group


@dataclass(frozen=True, slots=True)
class Sent:
    """Size of an update in bytes, and the maximum of bytes in flight."""

    num_bytes: int
    most_under_way: int


class Channel:
    """End of a channel, made by :meth:`connect`. One thread at a time uses it; any thread may :meth:`abort` it.

    After an error inside an update the channel is broken and every later call says why: close it and connect both
    sides anew. An update that was refused by its header leaves the channel intact.

    ``read_ranks`` (rank 0) maps each worker's rank to the trainer's rank whose bytes it read in the last update.
    """

    def __init__(self, *, rank: int, links: Links, transport: Transport) -> None:
        self.rank = rank
        self.updates = 0
        self.read_ranks: dict[int, int] = {}
        self._links = links
        self._transport = transport
        self._broken: str | None = None

    @classmethod
    def connect(
        cls,
        *,
        init_method: str,
        world_size: int,
        rank: int,
        backend: ChannelBackend,
        device: torch.device | str,
        deadline: Deadline,
        rendezvous: Rendezvous | None = None,
        cancel: threading.Event | None = None,
        secret: str = "",
    ) -> Channel:
        """Connect to the other ranks and build the transport; return when all are connected.

        Args:
            init_method: "tcp://host:port" of the trainer.
            world_size: the trainer and all engine workers.
            rank: 0 is the trainer, which listens; the others knock until it does.
            backend: ``gloo`` over the CPU, ``nccl`` between GPUs, ``ipc`` through memory of one device.
            device: where this side's tensors live; a GPU with its index.
            deadline: of connecting and building.
            rendezvous: rank 0, where :func:`~lachesis.transport.rendezvous.listen` was called before (to know a port).
            cancel: set it from another thread to give up waiting.
            secret: other ranks: the secret of rank 0's rendezvous.

        Raises:
            EngineError: the sides do not fit together, a peer died, or ``cancel`` was set.
            DeadlineExceeded: a rank did not come.
        """
        links = Links()
        hello = {"protocol": PROTOCOL, "world_size": world_size, "backend": backend, "rank": rank}
        try:
            if rank == 0:
                rendezvous = rendezvous or listen(init_method)
                with rendezvous.listener:
                    links.accept(rendezvous, hello=hello, cancel=cancel, deadline=deadline)
            else:
                links.connect(init_method, hello=hello, cancel=cancel, deadline=deadline, secret=secret)
            transport = _build_transport(
                backend, rank=rank, world_size=world_size, device=torch.device(device), links=links, deadline=deadline
            )
        except LachesisError as error:
            links.report(str(error))
            links.close()
            raise
        return cls(rank=rank, links=links, transport=transport)

    @torch.no_grad()
    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        specs: Sequence[ReceivedTensor],
        *,
        deadline: Deadline,
        bucket_bytes: int = BUCKET_BYTES,
        window: int | None = None,
        partners: Partners | None = None,
    ) -> Sent:
        """Send one update (rank 0); return once every engine worker has loaded all of it.

        Args:
            tensors: name and tensor in the order of ``specs``, on any device; taken one by one, so that they may
                be made on the way (gathered, merged) and no second copy of the model is ever held.
            specs: names, shapes and dtypes; a tensor of another dtype is cast.
            bucket_bytes: bounds a bucket, unless one tensor is larger.
            window: number of buckets in flight, for which there is memory; unset, the transport chooses.
            partners: ranks that pack the same buckets, each in its own device's memory.

        Raises:
            EngineError: a worker refused the header, failed or died, or ``tensors`` are not those of ``specs``.
            DeadlineExceeded: the deadline passed.
        """
        self._check(sending=True)
        window = window or self._transport.window
        buckets = plan_buckets(specs, limit_bytes=bucket_bytes, window=window)
        with self._breaking():
            refusal = self._offer(specs, bucket_bytes=bucket_bytes, window=window, deadline=deadline)
        if refusal is not None:
            raise EngineError(
                f"the engine refuses update {self.updates} of the weights: {refusal}",
                remedy="announce exactly the tensors that are sent to /nccl/start_receiver",
            )
        with self._breaking():
            source = iter(tensors)
            most = self._send_buckets(buckets, source, partners=partners or NoPartners(), deadline=deadline)
            self._links.send({"end": self.updates})
            loaded = self._expect("loaded", deadline=deadline)
            self.read_ranks = {rank: answer["read"] for rank, answer in loaded.items()}
            self._transport.let_go()
        return Sent(sum(bucket.num_bytes for bucket in buckets), most)

    def _send_buckets(
        self, buckets: Sequence[Bucket], source: Iterator[tuple[str, Tensor]], *, partners: Partners, deadline: Deadline
    ) -> int:
        """Pack and send each bucket once its place in the ring is free; return the maximum of bytes in flight."""
        ring = self._transport.ring(ring_bytes(buckets))
        under_way: deque[tuple[Bucket, Callable[[], None]]] = deque()
        taken = most = 0

        def take_back(until: int) -> None:
            nonlocal taken
            for _ in range(taken, until):
                self._expect("taken", deadline=deadline)
                under_way.popleft()[1]()
            taken = max(taken, until)

        for number, bucket in enumerate(buckets):
            take_back(bucket.after)
            place = ring[bucket.place : bucket.place + bucket.num_bytes]
            partners.begin()
            pack(place, bucket, source)
            self._links.send({"bucket": number, **self._transport.announcement(partners.packed())})
            under_way.append((bucket, self._transport.send(place, deadline=deadline)))
            most = max(most, sum(sent.num_bytes for sent, _ in under_way))
        # Asked before this side waits: if ranks gather for one another, the source may still have to help the others.
        extra = next(source, None)
        if extra is not None:
            raise EngineError(f"the tensor {extra[0]!r} follows, but it is not in the announced list of tensors")
        take_back(len(buckets))
        return most

    @contextmanager
    def receive(
        self, specs: Sequence[ReceivedTensor], *, deadline: Deadline, keep: torch.device | None = None
    ) -> Generator[Iterator[tuple[str, Tensor]]]:
        """Yield the tensors of one update as they arrive (ranks other than 0).

        Example::

            with channel.receive(specs, deadline=deadline) as tensors:
                model.load_weights(tensors)

        A tensor is a view of the receive buffer: copy it (on the current stream) before asking for the next; with
        ``keep`` the caller owns it, on that device. All must be taken; an error inside the block is reported to the
        trainer and breaks the channel. Leaving the block tells the trainer that everything has been loaded.

        Raises:
            EngineError: the trainer wants to send something else, failed or died.
            DeadlineExceeded: the deadline passed. If no update had begun, the channel can still be used.
        """
        self._check(sending=False)
        header = self._await_header(deadline)
        problem = difference(specs, header.get("tensors"))
        with self._breaking():
            self.updates = header["update"]
            self._links.send({"refused": problem} if problem else {"accepted": self.updates})
        if problem is not None:
            raise EngineError(
                f"the trainer's update {self.updates} does not have the tensors that this engine expects: {problem}",
                remedy="announce exactly the tensors that are sent to /nccl/start_receiver",
            )
        if "stop" in (go := self._next(deadline, "the first bucket")):
            raise EngineError(f"the trainer stopped update {self.updates}: {go['stop']}")
        with self._breaking():
            buckets = plan_buckets(specs, limit_bytes=header["bucket_bytes"], window=header["window"])
            tensors = self._arriving(buckets, go, keep=keep, deadline=deadline)
            yield tensors
            left = next(tensors, None)
            if left is not None:
                raise EngineError(f"the engine did not load the tensor {left[0]!r} and the ones after it")
            self._transport.finish(self._transport.mark(), deadline=deadline)
            self._links.send({"loaded": self.updates, "read": self._transport.read_rank})
            self._transport.let_go()

    def abort(self, reason: str) -> None:
        """End this side's current wait with an EngineError; callable from any thread."""
        self._links.abort(reason)

    def close(self) -> None:
        """Leave the channel, which ends the other side's waits with an error. Idempotent."""
        self._broken = self._broken or "it was closed"
        self._links.close()
        self._transport.close()

    def _offer(
        self, specs: Sequence[ReceivedTensor], *, bucket_bytes: int, window: int, deadline: Deadline
    ) -> str | None:
        """Send the header; return the reason if a worker refuses, after telling the others to forget the update."""
        self.updates += 1
        sizes = {"bucket_bytes": bucket_bytes, "window": window}
        self._links.send({"update": self.updates, "tensors": to_wire(specs), **sizes})
        answers = {
            rank: self._links.receive(rank, deadline=deadline, waiting_for="its answer to the header")
            for rank in self._links.ranks
        }
        refused = {rank: answer["refused"] for rank, answer in answers.items() if "refused" in answer}
        if not refused:
            return None
        reason = next(iter(refused.values()))
        self._links.send({"stop": reason}, ranks=[rank for rank in answers if rank not in refused])
        return reason

    def _arriving(
        self, buckets: Sequence[Bucket], message: Message, *, keep: torch.device | None, deadline: Deadline
    ) -> Iterator[tuple[str, Tensor]]:
        ring, taken = ring_bytes(buckets), 0
        marks: deque[torch.cuda.Event | None] = deque()
        for number, bucket in enumerate(buckets):
            if message.get("bucket") != number:
                raise EngineError(f"expected bucket {number} of update {self.updates}, got {dict(message)}")
            buffer = self._transport.receive(bucket, ring=ring, announcement=message, keep=keep, deadline=deadline)
            for packed, view in zip(bucket.tensors, _views(buffer, bucket), strict=True):
                yield packed.tensor.name, view
            marks.append(self._transport.mark())
            # Finish only the buckets that the trainer waits for before it sends the next; others are still in flight.
            while taken < (buckets[number + 1].after if number + 1 < len(buckets) else len(buckets)):
                self._transport.finish(marks.popleft(), deadline=deadline)
                self._links.send({"taken": taken})
                taken += 1
            message = self._next(deadline, "the next bucket")
        if message.get("end") != self.updates:
            raise EngineError(f"expected the end of update {self.updates}, got {dict(message)}")

    def _await_header(self, deadline: Deadline) -> Message:
        message = self._links.receive(0, deadline=deadline, waiting_for="an update of the weights")
        if "update" not in message:
            self._break(f"expected a header, got {dict(message)}")
            self._check(sending=False)
        return message

    def _next(self, deadline: Deadline, waiting_for: str) -> Message:
        with self._breaking():
            return self._links.receive(0, deadline=deadline, waiting_for=waiting_for)

    def _expect(self, word: str, *, deadline: Deadline) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        for rank in self._links.ranks:
            answer = self._links.receive(rank, deadline=deadline, waiting_for=f'"{word}" of update {self.updates}')
            if word not in answer:
                raise EngineError(f"expected {word!r} from rank {rank}, got {dict(answer)}")
            answers[rank] = answer
        return answers

    @contextmanager
    def _breaking(self) -> Generator[None]:
        """Break the channel and tell the peers if the block fails."""
        try:
            yield
        except BaseException as error:
            self._break(f"{type(error).__name__}: {error}"[:2000])
            raise

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._links.report(reason)
            self._transport.abort()

    def _check(self, *, sending: bool) -> None:
        if self._broken is not None:
            raise EngineError(
                f"the weight channel can no longer be used: {self._broken}", remedy="connect both sides again"
            )
        if sending != (self.rank == 0):
            verb = "send" if sending else "receive"
            raise EngineError(f"rank {self.rank} of a weight channel cannot {verb}: rank 0 sends, the others receive")


def _build_transport(
    backend: ChannelBackend, *, rank: int, world_size: int, device: torch.device, links: Links, deadline: Deadline
) -> Transport:
    """Connect a transport over established links; all ranks call it together. Raises as :meth:`Channel.connect`."""
    transport: Transport
    if backend == "ipc":
        transport = SharedBuffer(rank=rank, device=device, links=links)
    else:
        group = build_group(backend, rank=rank, world_size=world_size, device=device, links=links, deadline=deadline)
        transport = Collective(group, device=device if backend == "nccl" else torch.device("cpu"), links=links)
    if rank == 0:
        for peer in links.ranks:
            links.receive(peer, deadline=deadline, waiting_for="that its transport is ready")
        links.send({"ready": True})
    else:
        links.send({"ready": True})
        links.receive(0, deadline=deadline, waiting_for="that all transports are ready")
    return transport


def pack(buffer: Tensor, bucket: Bucket, source: Iterator[tuple[str, Tensor]]) -> None:
    """Copy the next tensors of ``source`` into ``buffer`` [bytes], checking that they are those of the bucket."""
    for packed, view in zip(bucket.tensors, _views(buffer, bucket), strict=True):
        name, tensor = next(source, ("nothing", None))
        if tensor is None or name != packed.tensor.name or tuple(tensor.shape) != tuple(packed.tensor.shape):
            found = "nothing" if tensor is None else f"{name} {list(tensor.shape)}"
            raise EngineError(f"expected to send {packed.tensor.name} {list(packed.tensor.shape)}, got {found}")
        view.copy_(tensor, non_blocking=view.is_cuda)


def _views(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """Return the tensors of a bucket as views of ``buffer`` [bytes]."""
    return [
        buffer[packed.offset : packed.offset + packed.num_bytes]
        .view(getattr(torch, packed.tensor.dtype))
        .view(packed.tensor.shape)
        for packed in bucket.tensors
    ]
