from __future__ import annotations

import pytest

from lachesis.plugins.atropos.api.batching import GroupQueue
from lachesis.plugins.atropos.api.environments import Environments
from lachesis.plugins.atropos.api.wire import EnvRegistration
from tests.unit.plugins.atropos.api.test_batching import held


def environments(*changes: dict, now: float = 0.0) -> Environments:
    found = Environments(timeout_s=300)
    for change in changes:
        asked = {"max_token_length": 100, "desired_name": "env", "weight": 1.0, "group_size": 4} | change
        found.add(EnvRegistration(**asked), now=now)
    return found


def queue_of(*groups: tuple[int | None, int]) -> GroupQueue:
    queue = GroupQueue()
    for position, (env_id, size) in enumerate(groups):
        queue.append(held(position, size, env_id))
    return queue


def test_names_count_up_within_a_desired_name():
    names = [env.name for env in environments({}, {"desired_name": "b"}, {}, {"desired_name": "b"})]
    assert names == ["env_0", "b_0", "env_1", "b_1"]


def test_ids_are_those_given():
    found = environments({}, {})
    assert [found.get(env_id) is not None for env_id in (0, 1, 2, -1, None)] == [True, True, False, False, False]


def test_weight_is_the_share_of_weight_times_length():
    found = environments({}, {"weight": 3.0}, {"weight": -5.0}, {"max_token_length": 400, "weight": 0.0})
    weights = [found.status(env, GroupQueue(), batch_size=8, now=0)["env_weight"] for env in found]
    assert weights == pytest.approx([0.25, 0.75, 0.01, 0.01])


def test_queue_size_counts_others_beyond_their_minimum_in_groups_of_the_caller():
    found = environments({}, {"min_batch_allocation": 0.5, "group_size": 8})
    queue = queue_of((0, 4), (0, 4), (1, 8), (1, 8), (None, 4))
    caller, other = found
    status = found.status(caller, queue, batch_size=16, now=0)
    assert status["queue_size"] == (8 + (16 - 8) + 8) // 4 and status["self_queue_size"] == 2
    assert status["max_group_size"] == 8 and status["unallocated_fraction"] == 0.5
    assert found.status(other, queue, batch_size=16, now=0)["queue_size"] == (16 + 8 + 8) // 8


def test_group_size_is_that_of_the_largest_queued_for_as_long_as_it_is_queued():
    found = environments({})
    (env,) = found
    assert found.status(env, queue_of((0, 8), (0, 8)), batch_size=16, now=0)["self_queue_size"] == 2
    assert found.status(env, queue_of((0, 4), (0, 4)), batch_size=16, now=0)["self_queue_size"] == 2


def test_singles_of_others_do_not_count():
    found = environments({"group_size": 1})
    (env,) = found
    status = found.status(env, queue_of((0, 1), (None, 1)), batch_size=4, now=0)
    assert (status["queue_size"], status["max_group_size"]) == (1, 1)


def test_the_silent_and_the_gone_owe_nothing():
    found = environments({"min_batch_allocation": 0.5}, {"min_batch_allocation": 0.25, "group_size": 2}, {})
    first, second, third = found
    assert found.demand(16, now=10).minimums == {0: 8, 1: 4}
    assert found.demand(16, now=10).sizes == {4, 2}
    second.last_seen = third.last_seen = 400.0
    assert found.demand(16, now=400).minimums == {1: 4}
    assert found.demand(16, now=400).sizes == frozenset()
    assert found.status(third, GroupQueue(), batch_size=16, now=400)["env_weight"] == 0.5
    second.connected = False
    assert found.demand(16, now=400).minimums == {}
    assert first not in found.present(400)


def test_minimums_below_a_sequence_are_none():
    assert environments({"min_batch_allocation": 0.05}, {"min_batch_allocation": 2.0}).demand(16, now=0).minimums == {
        1: 16
    }


def test_dump_and_load():
    found = environments({"weight": 2.0}, {"min_batch_allocation": 0.5})
    found.get(0).connected = False
    again = Environments(timeout_s=300)
    again.load(found.dump(), now=1000.0)
    assert again.dump() == found.dump() and [env.id for env in again.present(1000.0)] == [1]


def test_score_is_a_running_mean():
    (env,) = environments({})
    env.note_group(score=None, now=1)
    assert env.score is None
    for _ in range(200):
        env.note_group(score=1.0, now=2)
    assert env.score == pytest.approx(1.0) and env.groups == 201 and env.last_post == 2
