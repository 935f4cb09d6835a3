from __future__ import annotations

import json
from collections import Counter

import pytest

from lachesis.errors import CheckpointError
from lachesis.pipeline.replay import ReplayBuffer, score
from tests.unit.pipeline.sources import group


def names(groups) -> list[str]:
    return [g.prompt.id for g in groups]


def test_the_score_is_the_spread_of_the_rewards():
    assert score(group("a", (0.0, 1.0))) == pytest.approx(1.0)
    assert score(group("a", (0.0, 0.0, 3.0, None))) == pytest.approx(4.0)
    assert score(group("a", (None,))) == 0.0


def test_groups_without_signal_are_replaced_in_their_place_and_marked():
    buffer = ReplayBuffer(size=4, seed=0)
    assert names(buffer.mix([group("a", (0, 1)), group("b", (0, 0))])) == ["a", "b"], "nothing to replay yet"
    mixed = buffer.mix([group("c", (1, 1)), group("d", (0, 1)), group("e", (0, 0))])
    assert names(mixed) == ["a", "d", "e"], "one is there, and none is drawn twice in a batch"
    assert [g.replayed for g in mixed] == [True, False, False]
    assert len(buffer) == 2, "a stays, d came in, groups without signal never"


def test_a_full_buffer_keeps_the_best():
    buffer = ReplayBuffer(size=2, seed=0)
    buffer.mix([group("low", (0, 0.1)), group("high", (0, 5)), group("middle", (0, 1))])
    drawn = {name for _ in range(40) for name in names(buffer.mix([group("x", (0, 0)), group("y", (0, 0))]))}
    assert drawn == {"high", "middle"}


def test_draws_are_in_proportion_to_the_score():
    buffer = ReplayBuffer(size=2, seed=1)
    buffer.mix([group("one", (0, 1)), group("three", (0, 3))])
    drawn = Counter(names(buffer.mix([group("x", (0, 0))]))[0] for _ in range(4000))
    assert drawn["three"] / drawn["one"] == pytest.approx(3.0, rel=0.15)


def test_a_restored_buffer_draws_what_the_first_would_have():
    first = ReplayBuffer(size=8, seed=3)
    first.mix([group(str(i), (0, i + 1)) for i in range(8)])
    first.mix([group("x", (0, 0))])
    second = ReplayBuffer(size=8, seed=99)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    empty = [group("x", (0, 0))] * 3
    for _ in range(20):
        assert first.mix(empty) == second.mix(empty)


def test_a_smaller_buffer_keeps_the_best_of_a_state_and_rubbish_is_refused():
    first = ReplayBuffer(size=8, seed=3)
    first.mix([group(str(i), (0, i + 1)) for i in range(8)])
    small = ReplayBuffer(size=2, seed=0)
    small.load_state_dict(first.state_dict())
    assert sorted(names(small.mix([group("x", (0, 0))] * 2))) == ["6", "7"]
    with pytest.raises(CheckpointError, match="replay buffer"):
        small.load_state_dict({"groups": [{}], "random": []})
