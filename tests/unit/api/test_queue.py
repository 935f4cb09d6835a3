from __future__ import annotations

from lachesis.api.queue import GroupQueue
from lachesis.api.records import HeldGroup, StoredGroup


def held(position: int, size: int, env_id: int | None = None, *, json: bytes = b"{}") -> HeldGroup:
    return HeldGroup(
        number=position,
        position=position,
        group=StoredGroup(json=json, sequences=size, tokens=10 * size, env_id=env_id),
    )


def test_counts_follow_what_comes_and_goes():
    queue = GroupQueue()
    groups = [held(0, 4, 1), held(1, 8), held(2, 4, 1), held(3, 2, 1)]
    for group in groups:
        queue.append(group)
    assert len(queue) == 4 and dict(queue.sequences) == {1: 10, None: 8} and queue.tokens == 180
    assert (queue.largest(), queue.largest(1), queue.largest(5)) == (8, 4, 0)
    assert queue.take([(1, 4), (None, 8), (1, 4)]) == (groups[0], groups[1], groups[2])
    assert dict(queue.sequences) == {1: 2} and set(queue.lanes) == {(1, 2)} and queue.weight == 20


def test_groups_put_back_are_where_they_were():
    queue = GroupQueue()
    for position in range(4):
        queue.append(held(position, 4))
    taken = queue.take([(None, 4)] * 3)
    queue.put_back(taken[1:])
    queue.put_back(taken[:1])
    assert list(queue.lanes[None, 4]) == [0, 1, 2, 3]


def test_weight_bounds_the_bytes_of_a_token():
    queue = GroupQueue()
    queue.append(held(0, 1, json=b"x" * 6400))
    assert queue.tokens == 10 and queue.weight == 110
