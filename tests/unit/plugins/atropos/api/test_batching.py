from __future__ import annotations

import itertools
import random
import time
from collections import Counter, deque

import pytest

from lachesis.plugins.atropos.api.batching import Demand, GroupQueue, Key, plan_batch, released, stranded, waiting_for
from lachesis.plugins.atropos.api.entries import HeldGroup, StoredGroup


def lanes(*groups: tuple[int | None, int]) -> dict[Key, deque[int]]:
    """Lanes of groups given as (environment, size) in order of arrival."""
    found: dict[Key, deque[int]] = {}
    for position, key in enumerate(groups):
        found.setdefault(key, deque()).append(position)
    return found


def planned(groups: list[tuple[int | None, int]], batch_size: int, **demand) -> list[int] | None:
    """Positions of the groups in the next batch, in the order taken."""
    queue = lanes(*groups)
    keys = plan_batch(queue, Demand(batch_size=batch_size, minimums=demand.pop("minimums", {}), **demand))
    return None if keys is None else [queue[key].popleft() for key in keys]


def sizes(*values: int) -> list[tuple[int | None, int]]:
    return [(None, value) for value in values]


def original_batch(groups: list[tuple[int | None, int]], batch_size: int) -> list[int] | None:
    """The rule of the original without minimums: full packs in order of completion, up to the batch size."""
    if not groups:
        return None
    largest = max(size for _, size in groups)
    packs: dict[int, list[int]] = {}
    order: list[int] = []
    for position, (_, size) in enumerate(groups):
        pack = packs.setdefault(size, [])
        pack.append(position)
        if len(pack) * size == largest:
            order += pack
            pack.clear()
    for count, total in enumerate(itertools.accumulate(groups[position][1] for position in order)):
        if total >= batch_size:
            return order[: count + 1] if total == batch_size else None
    return None


def test_oldest_groups_first_and_whole():
    assert planned(sizes(4, 4, 4), 8) == [0, 1]
    assert planned(sizes(4), 8) is None
    assert planned([], 8) is None
    assert planned(sizes(8, 4, 4), 8) == [0]
    assert planned(sizes(4, 8, 4), 8) == [0, 2]


@pytest.mark.parametrize(
    ("queue", "batch_size", "expected"),
    [
        ((8, 8, 4, 4), 12, [0, 2]),
        ((4, 6, 4, 6), 10, [0, 1]),
        ((3, 3, 5, 5), 8, [0, 2]),
        ((2, 16, 2, 2, 2), 8, [0, 2, 3, 4]),
        ((5, 3, 2), 5, [0]),
        ((3, 5, 2), 5, [0, 2]),
    ],
)
def test_mixes_on_which_the_original_waits_for_ever(queue: tuple[int, ...], batch_size: int, expected: list[int]):
    assert planned(sizes(*queue), batch_size) == expected


def test_any_exact_batch_is_found_and_the_original_never_finds_more():
    chance = random.Random(7)
    exact = 0
    for _ in range(400):
        queue = sizes(*(chance.choice([1, 2, 3, 4, 6, 8]) for _ in range(chance.randrange(1, 9))))
        batch_size = chance.randrange(1, 17)
        got = planned(queue, batch_size)
        possible = any(
            sum(size for _, size in chosen) == batch_size
            for count in range(1, len(queue) + 1)
            for chosen in itertools.combinations(queue, count)
        )
        total = sum(queue[position][1] for position in got or ())
        if got is not None and total != batch_size:
            # Not exact: then it is all of sizes that are part of no exact batch.
            assert {queue[position][1] for position in got} <= stranded(
                {size for _, size in queue}, Demand(batch_size, {})
            )
            continue
        assert (got is not None) == possible
        exact += possible
        if original_batch(queue, batch_size) is not None:
            assert got is not None
    assert exact > 100


def test_equal_sizes_give_the_batches_of_the_original():
    queue = sizes(*[4] * 11)
    assert planned(queue, 16) == original_batch(queue, 16) == [0, 1, 2, 3]


def test_sizes_that_fit_no_batch_go_out_alone_once_a_batch_of_them_is_there():
    assert planned(sizes(3, 3), 8) is None
    assert planned(sizes(3, 3, 3), 8) == [0, 1]
    assert planned(sizes(20, 4, 4), 8) == [0]
    # Behind others that make no batch: they need not be the oldest.
    assert planned(sizes(8, 8, 8, 65), 64) == [3]
    assert planned(sizes(4, 3, 3, 3), 8) == [1, 2]
    # Not before the groups that are older.
    assert planned(sizes(8, 3, 3, 3), 8) == [0]
    # And not while an environment may still send what completes them.
    assert planned(sizes(3, 3, 3), 8, sizes=frozenset({5})) is None
    assert stranded({3, 8, 9}, Demand(8, {})) == {3, 9}
    assert stranded({3, 8, 9}, Demand(8, {}, frozenset({5}))) == {9}


def test_a_long_or_full_queue_gives_the_nearest_batch_below_the_size():
    queue = lanes(*sizes(6, 6, 6, 6, 6, 6))
    demand = Demand(16, {}, frozenset({4}))
    assert plan_batch(queue, demand.of(queued=30, full=False)) is None
    assert plan_batch(queue, demand.of(queued=36, full=False)) == ((None, 6),) * 2
    assert plan_batch(queue, demand.of(queued=30, full=True)) == ((None, 6),) * 2
    # Less than a batch does not become one, however full the queue is.
    assert plan_batch(lanes(*sizes(6, 6)), demand.of(queued=12, full=True)) is None
    # A long queue waits for the one who owes; a full one cannot.
    owed = Demand(16, {1: 4}, frozenset({4}))
    assert plan_batch(queue, owed.of(queued=36, full=False)) is None
    assert plan_batch(queue, owed.of(queued=36, full=True)) == ((None, 6),) * 2


def test_whatever_the_sizes_a_batch_is_handed_out_when_one_can_be():
    chance = random.Random(40)
    exact = inexact = 0
    for _ in range(1500):
        batch_size = chance.choice([1, 2, 7, 8, 16, 64])
        largest = chance.choice([batch_size // 2 + 1, batch_size + 1, 3 * batch_size])
        known = [chance.randint(1, largest) for _ in range(chance.randint(1, 3))]
        queue = sizes(*(chance.choice(known) for _ in range(chance.randint(1, 12))))
        queued = sum(size for _, size in queue)
        demand = Demand(batch_size, {}, frozenset(chance.sample(range(1, largest + 1), chance.randint(0, 1))))
        possible = any(
            sum(size for _, size in chosen) == batch_size
            for count in range(1, len(queue) + 1)
            for chosen in itertools.combinations(queue, count)
        )
        full = chance.random() < 0.3
        keys = plan_batch(lanes(*queue), demand.of(queued=queued, full=full))
        if possible or queued >= 2 * batch_size or (full and queued >= batch_size):
            assert keys, (queue, batch_size)
        if keys:
            total = sum(size for _, size in keys)
            assert total <= batch_size or len(keys) == 1
            assert Counter(keys) <= Counter(queue)
            exact += total == batch_size
            inexact += total != batch_size
    assert exact > 200 and inexact > 200


def test_minimums():
    queue = [(0, 4), (0, 4), (0, 4), (1, 4)]
    assert planned(queue, 8, minimums={1: 4}) == [3, 0]
    assert planned(queue[:3], 8, minimums={1: 4}) is None
    # As much of the share as there is, and others for the rest, those of nobody too.
    assert planned([(None, 4), *queue], 16, minimums={1: 8}) == [4, 0, 1, 2]
    # Together above the batch: scaled down, at least one group each.
    assert planned([*queue, (1, 4)], 8, minimums={0: 8, 1: 8}) == [0, 3]
    assert planned([(0, 2), (0, 2), (1, 8)], 10, minimums={0: 10, 1: 10}) == [0, 2]


def test_a_minimum_that_leaves_no_exact_rest_takes_less():
    assert planned([(1, 6), (1, 6), (0, 4)], 10, minimums={1: 8}) == [0, 2]


def test_minimums_that_can_never_be_met_together_do_not_block():
    assert planned([(0, 8), (1, 5), (0, 8)], 16, minimums={0: 8, 1: 4}) == [0, 2]
    # Four more of environment 1 could still arrive: wait.
    assert planned([(0, 8), (1, 4), (0, 8)], 16, minimums={0: 8, 1: 4}) is None


def test_cost_does_not_grow_with_the_backlog():
    def seconds(backlog: int, minimums: dict[int, int]) -> float:
        queue = lanes(*((number % 3, (8, 4)[number % 2]) for number in range(backlog)))
        demand = Demand(64, minimums)
        times = []
        for _ in range(15):
            start = time.thread_time()
            assert plan_batch(queue, demand) is not None
            times.append(time.thread_time() - start)
        return min(times)

    for minimums in ({}, {0: 16, 1: 32}):
        assert seconds(50_000, minimums) < 10 * seconds(500, minimums) + 1e-3


def test_buffered_groups_leave_in_order_of_arrival_or_as_a_fitting_subset():
    assert released([1, 2], 4) == ()
    assert released([1, 3], 4) == (0, 1)
    assert released([1, 2, 3], 4) == (0, 2)
    # Greedily 3 blocks the twos; of two subsets the later one leaves.
    assert released([3, 2, 2], 4) == (1, 2)
    assert released([3, 2, 2, 2], 4) == (2, 3)
    assert released([2, 1, 1, 3], 4) == (0, 1, 2)


def test_buffer_is_bounded():
    chance = random.Random(3)
    for group_size in (2, 5, 8, 13):
        buffer: list[int] = []
        for _ in range(300):
            buffer.append(chance.choice([size for size in (3, 5, 7) if size < group_size] or [1]))
            leaving = released(buffer, group_size)
            assert sum(buffer[index] for index in leaving) % group_size == 0
            buffer = [size for index, size in enumerate(buffer) if index not in leaving]
            assert len(buffer) < group_size
    assert released([3] * 8, 8) == tuple(range(8))


def test_waiting_is_explained():
    demand = Demand(16, {2: 4})
    assert waiting_for(lanes((0, 8)), demand, {2: "math_0"}) == (
        "environment math_0 owes 4 sequences and has none queued"
    )
    assert waiting_for(lanes((2, 8)), demand, {}) == "8 of 16 sequences are queued"
    text = "20 of 16 sequences are queued in groups of 4, 6, which do not add up to a batch yet"
    assert waiting_for(lanes((2, 4), (2, 4), *[(2, 6)] * 2), demand, {}) == text


def test_a_batch_counts_in_its_sequences():
    chance = random.Random(1)
    queue = [(chance.choice([None, 0, 1]), chance.choice([2, 4, 8])) for _ in range(200)]
    left = lanes(*queue)
    seen: Counter[int] = Counter()
    while (keys := plan_batch(left, Demand(32, {0: 8}))) is not None:
        assert sum(size for _, size in keys) == 32
        queued = sum(size * len(lane) for (env, size), lane in left.items() if env == 0)
        assert sum(size for env, size in keys if env == 0) >= min(8, queued)
        for key in keys:
            seen[left[key].popleft()] += 1
            if not left[key]:
                del left[key]
    assert len(seen) > 150 and set(seen.values()) == {1}


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
