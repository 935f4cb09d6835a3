"""The control group over gloo, its ranks in threads of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded
from lachesis.common.world import World
from lachesis.train.distributed.control import ControlGroup, Tag
from lachesis.train.distributed.job import attempt_store
from lachesis.train.distributed.messages import Answer, Turn

LIMIT_S = 60.0


def world(rank: int, size: int, *, restarts: int = 0) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size, restarts=restarts)


def control_groups(size: int, *, store: Any = None, limits: Any = None, restarts: int = 0) -> list[ControlGroup]:
    store = store or dist.HashStore()
    limits = limits or [LIMIT_S] * size

    def build(rank: int) -> ControlGroup:
        own = world(rank, size, restarts=restarts)
        return ControlGroup(own, attempt_store(own, store), limit_s=limits[rank])

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(build, range(size)))


@pytest.mark.parametrize("numbers", [1, 100_000])
def test_messages_arrive_whole_whatever_their_size(numbers: int):
    groups = control_groups(3)
    part = torch.arange(numbers)

    def take(group: ControlGroup) -> Any:
        turn = group.broadcast(Turn(4, "step", (part,)) if group.rank == 0 else None)
        if group.rank > 0:
            group.send(Answer(turn.number, turn.arguments[0] * group.rank), to=0, tag=Tag.ANSWER)
            return None
        # From the last to the first: each waits for its own sender, whatever else has come.
        return [group.receive(rank, tag=Tag.ANSWER).value for rank in (2, 1)]

    with ThreadPoolExecutor(3) as threads:
        answers, *_ = threads.map(take, groups)
    assert torch.equal(answers[0], part * 2)
    assert torch.equal(answers[1], part)


def test_ranks_are_named_and_have_the_leaders_limit():
    groups = control_groups(2, limits=[30.0, 600.0])
    assert [group.limit_s for group in groups] == [30.0, 30.0]
    assert "the leader, rank 0 (process " in groups[1].name(0)
    assert "rank 1 (process " in groups[0].name(1)


def test_an_attempt_after_another_does_not_find_its_addresses():
    store = dist.HashStore()
    first = control_groups(2, store=store)
    second = control_groups(2, store=store, restarts=1)
    with ThreadPoolExecutor(2) as threads:
        turns = threads.map(lambda group: group.broadcast(Turn(0, "step") if group.rank == 0 else None), second)
    assert list(turns) == [Turn(0, "step")] * 2
    assert len(first) == 2


def test_a_rank_that_does_not_come_is_named():
    store = attempt_store(world(0, 3), dist.HashStore())
    with pytest.raises(DeadlineExceeded, match=r"rank 0 heard nothing from rank 1 of 3 for 0.05 s"):
        ControlGroup(world(0, 3), store, limit_s=0.05)


def test_who_does_not_answer_in_time_is_named():
    first, _second = control_groups(2)
    with pytest.raises(DeadlineExceeded, match=r"rank 1 doing its part took longer than 0.05 s"):
        first.receive(1, tag=Tag.ANSWER, deadline=Deadline("rank 1 doing its part", 0.05))
