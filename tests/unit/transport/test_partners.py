"""Several ranks of a trainer pack each bucket, and each worker of the engine reads that of its own rank."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lachesis.common.errors import EngineError
from lachesis.transport.layout import plan_buckets
from lachesis.transport.partners import PartnerLine, pack_beside
from lachesis.transport.shared_tensors import memory_directory
from lachesis.transport.transports import SharedRoom
from tests.unit.transport.test_channel import SPECS, TENSORS, assert_same, pair, take, within
from tests.waiting import LONG_S

CPU = torch.device("cpu")
BUCKET_BYTES = 300


class FakeLine:
    """Both ends of what rank 0 and one partner say to one another."""

    def __init__(self) -> None:
        self.words: queue.Queue[Any] = queue.Queue()
        self.places: queue.Queue[Any] = queue.Queue()

    def tell(self, message: Any) -> None:
        self.words.put(message)

    def hear(self) -> Sequence[Any]:
        return (self.places.get(timeout=LONG_S),)

    @property
    def partner(self) -> FakeLine:
        other = FakeLine()
        other.words, other.places = self.places, self.words
        return other


class Trainer:
    """Rank 0 and a partner, and the engine's workers."""

    def __init__(self, *, workers: int = 2) -> None:
        self.channel, *self.workers = pair(1 + workers, backend="ipc")
        self.line, self.room = FakeLine(), SharedRoom(CPU)
        self.threads = ThreadPoolExecutor(1 + workers)
        self.taken: list[Future[dict[str, Tensor]]] = []
        self.left: list[str] = []

    def update(self, tensors: dict[str, Tensor], *, own: dict[str, Tensor] | None = None) -> list[dict[str, Tensor]]:
        """What each worker has received; the partner packs ``own`` where that is another."""
        self.taken = [self.threads.submit(take, worker) for worker in self.workers]
        packing = self.threads.submit(
            pack_beside, self._consumed(own or tensors), SPECS, bucket_bytes=BUCKET_BYTES, room=self.room,
            line=self.line.partner,
        )  # fmt: skip
        partners = PartnerLine(self.line, left=len(plan_buckets(SPECS, limit_bytes=BUCKET_BYTES)))
        try:
            self.channel.send(
                tensors.items(), SPECS, deadline=within(), bucket_bytes=BUCKET_BYTES, partners=partners
            )  # fmt: skip
        finally:
            partners.stop()
            packing.result(LONG_S)
        return [future.result(LONG_S) for future in self.taken]

    def _consumed(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        self.left = list(tensors)
        for name, tensor in tensors.items():
            self.left.remove(name)
            yield name, tensor

    def close(self) -> None:
        for channel in (self.channel, *self.workers):
            channel.close()
        self.room.close()
        self.threads.shutdown()


@contextmanager
def trainer(**options: Any) -> Iterator[Trainer]:
    made = Trainer(**options)
    try:
        yield made
    finally:
        made.close()


def test_each_worker_reads_what_its_own_rank_has_packed():
    before = set(memory_directory().iterdir())
    with trainer() as both:
        for update in range(3):
            mine = {name: tensor + update for name, tensor in TENSORS.items()}
            its = {name: tensor + update + 10 for name, tensor in TENSORS.items()}
            first, second = both.update(mine, own=its)
            assert_same(first, mine)
            assert_same(second, its)
            assert both.channel.read_ranks == {1: 0, 2: 1}
            assert len(set(memory_directory().iterdir()) - before) <= 2, "a room for each rank, used again"
    assert not set(memory_directory().iterdir()) - before


def test_a_worker_beside_which_nobody_packs_says_so():
    with trainer(workers=3) as both:
        with pytest.raises(EngineError, match=r"a worker of the engine is on GPU 2, but none of the trainer's 2 ranks"):
            both.update(TENSORS)
        assert not both.left, "what ranks gather together is gathered to the end"


def test_partners_end_an_update_that_an_engine_does_not_take():
    with trainer() as both:
        both.workers[1].close()
        with pytest.raises(EngineError, match="died"):
            both.update(TENSORS)
        assert not both.left


def test_tensors_that_are_not_announced_are_an_error_of_the_partner():
    line, room = FakeLine(), SharedRoom(CPU)
    options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "room": room, "line": line}
    line.places.put("pack")
    with pytest.raises(EngineError, match=r"expected to send a .*, got b"):
        pack_beside([("b", TENSORS["b"])], SPECS, **options)
    line.places.put("pack")
    with pytest.raises(EngineError, match="'b' follows, but it is not in the announced list"):
        pack_beside([*TENSORS.items()][:2], SPECS[:1], **options)
    room.close()


def test_one_rank_is_read_by_all_workers_of_its_device():
    sender, *engine = pair(3, backend="ipc")
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(take, worker) for worker in engine]
        sender.send(TENSORS.items(), SPECS, deadline=within())
        for future in taken:
            assert_same(future.result(LONG_S))
    assert sender.read_ranks == {1: 0, 2: 0}
    for channel in (sender, *engine):
        channel.close()
