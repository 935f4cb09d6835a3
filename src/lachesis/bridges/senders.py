"""Sending weights from several ranks of a trainer, each its share over a separate channel.

With a single sender only one rank's network card works. Each sender has a separate process group with all workers of
all engines. In one group of all of them broadcasts would follow one another, and every rank of the trainer would
receive data that it does not need.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Generic, Protocol

import torch
from torch import Tensor, nn

from lachesis.bridges.base import PolicyT
from lachesis.bridges.sent_weights import as_saved, base_parameters, full_weights, tensor_list, weight_parts
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.runs import runs
from lachesis.transport.channel import Channel, Sent
from lachesis.transport.layout import BUCKET_BYTES, ChannelBackend, ReceivedTensor
from lachesis.transport.rendezvous import Rendezvous, address_towards, listen

# Gathers tensors, each for one rank, which alone gets it whole; every rank must consume everything that is yielded.
Gather = Callable[[Sequence[tuple[int, Sequence[Tensor]]]], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that are gathered together, and the rank that sends them."""

    sender: int
    names: tuple[str, ...]


class SendsTogether(Protocol):
    """Policy whose ranks send together, seen from rank 0."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def model(self) -> nn.Module: ...

    def share(self, senders: Sequence[int], *, saved: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's tensors in order; consume all of them, because ranks gather for one another."""
        ...

    def others(self, step: str, told: Mapping[str, Any]) -> AbstractContextManager[list[Any]]:
        """Have the other ranks take a step of a transfer during the block; then their answers are in the list."""
        ...


@dataclass(frozen=True, slots=True)
class SenderRanks(Generic[PolicyT]):
    """Sending by several ranks: the policy's function for it, and the largest number of senders."""

    of: Callable[[PolicyT], SendsTogether]
    most: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Plan of senders, tensors and receivers, valid while the channels stand.

    ``senders`` are ranks of the trainer, beginning with 0; ``addresses`` are those of the others. ``sender_of`` has
    each tensor's sender; it is empty if there is only one.
    """

    tensors: tuple[ReceivedTensor, ...]
    ranks: Mapping[str, int]
    world_size: int
    secret: str
    senders: tuple[int, ...] = (0,)
    addresses: tuple[str, ...] = ()
    sender_of: tuple[int, ...] = ()

    @property
    def own(self) -> tuple[ReceivedTensor, ...]:
        """Return the tensors that rank 0 sends."""
        if not self.sender_of:
            return self.tensors
        return tuple(tensor for tensor, by in zip(self.tensors, self.sender_of, strict=True) if by == 0)


def spread_ranks(ranks: int, *, most: int) -> tuple[int, ...]:
    """Return at most ``most`` of the ranks, including rank 0, spread over all nodes and replicas."""
    count = min(ranks, most)
    return tuple(number * ranks // count for number in range(count))


def weight_sizes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each tensor of :func:`~lachesis.bridges.sent_weights.full_weights`."""
    return {name: p.numel() * p.element_size() for name, p in base_parameters(model).items()}


def deal(sizes: Mapping[str, int], *, senders: Sequence[int]) -> tuple[Part, ...]:
    """Divide parameters into runs of about a bucket's bytes, each for the sender with the fewest so far.

    The same on all ranks. There may be fewer parts than senders.
    """
    limit = min(BUCKET_BYTES, -(-sum(sizes.values()) // len(senders)))
    loads = dict.fromkeys(senders, 0)
    parts: list[Part] = []
    for names in runs(sizes, size=sizes.__getitem__, limit=limit):
        sender = min(senders, key=loads.__getitem__)
        loads[sender] += sum(sizes[name] for name in names)
        parts.append(Part(sender, tuple(names)))
    return tuple(parts)


def busy_senders(sizes: Mapping[str, int], *, candidates: Sequence[int]) -> tuple[int, ...]:
    """Return the candidates with anything to send."""
    senders = tuple(candidates)
    while len(used := {part.sender for part in deal(sizes, senders=senders)}) < len(senders):
        senders = tuple(sender for sender in senders if sender in used)
    return senders


def dealt_specs(
    model: nn.Module, *, senders: Sequence[int], saved: bool
) -> tuple[tuple[ReceivedTensor, ...], tuple[int, ...]]:
    """Return all tensors of an update in the model's order, and each one's sender as an index of ``senders``."""
    specs: list[ReceivedTensor] = []
    sender_of: list[int] = []
    parameters = base_parameters(model)
    for part in deal(weight_sizes(model), senders=senders):
        for name in part.names:
            empty = [(name, torch.empty(parameters[name].shape, dtype=parameters[name].dtype, device="meta"))]
            found = tensor_list(dict(as_saved(model, empty) if saved else empty))
            specs += found
            sender_of += [senders.index(part.sender)] * len(found)
    return tuple(specs), tuple(sender_of)


def dealt_weights(
    model: nn.Module, parts: Sequence[Part], *, rank: int, gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights that ``rank`` sends, merged; all ranks must consume this together."""
    made_of = weight_parts(model)
    stream = gather(
        [(part.sender, [tensor.detach() for name in part.names for tensor in made_of[name]]) for part in parts]
    )
    own = [name for part in parts if part.sender == rank for name in part.names]
    yield from full_weights(model, whole=lambda _: stream, names=own)
    exhaust(stream)  # the parts of others that come after the last of this one


def exhaust(stream: Iterable[Any]) -> None:
    """Consume and drop the rest of a stream."""
    deque(stream, maxlen=0)


class ShareSender:
    """Part of a rank other than 0 in a transfer: its address for engines, and the channel for its share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rendezvous: Rendezvous | None = None
        self._channel: Channel | None = None

    def listen(self, urls: Sequence[str], *, secret: str, host: str) -> str:
        """Begin to listen for new channels, and return the address.

        ``host`` is the name of rank 0's machine.

        Raises:
            EngineError: the engines cannot reach this machine.
        """
        self.close()
        address = address_towards(urls)
        if ip_address(address.strip("[]")).is_loopback and socket.gethostname() != host:
            raise EngineError(
                "engine.urls has a loopback address, which on this node means another machine than on rank 0's",
                remedy="use addresses in engine.urls that all nodes of the trainer can reach",
            )
        self._rendezvous = listen(f"tcp://{address}:0", secret=secret)
        return self._rendezvous.init_method

    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        specs: Sequence[ReceivedTensor],
        *,
        world_size: int,
        backend: ChannelBackend,
        deadline: Deadline,
    ) -> Sent:
        """Send an update, once connected. After an error a new :meth:`listen` is needed.

        Raises:
            EngineError, DeadlineExceeded: as :meth:`Channel.connect` and :meth:`Channel.send`.
        """
        try:
            if self._channel is None:
                assert self._rendezvous is not None, "listen() comes before"
                rendezvous, self._rendezvous = self._rendezvous, None
                self._channel = Channel.connect(
                    init_method=rendezvous.init_method,
                    world_size=world_size,
                    rank=0,
                    backend=backend,
                    device=self._device,
                    deadline=deadline,
                    rendezvous=rendezvous,
                )
            return self._channel.send(tensors, specs, deadline=deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the channel, and stop listening. Idempotent."""
        if self._rendezvous is not None:
            self._rendezvous.listener.close()
        if self._channel is not None:
            self._channel.close()
        self._rendezvous = self._channel = None
