from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from lachesis.common.errors import CheckpointError
from lachesis.common.types import Group, Prompt
from lachesis.pipeline.filters import any_reward_differs
from lachesis.pipeline.replay import ReplayBuffer, score
from lachesis.train.batch import pack
from tests.unit.pipeline.sources import group
from tests.unit.train.test_batch import sequences


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
    assert names(g.generated for g in mixed) == ["c", "d", "e"]
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


def test_a_replayed_group_keeps_its_tokens_beside_prompts_of_another_length():
    """Nothing is pasted into the rectangle of another batch: prompts are neither cut nor shifted, counts are anew."""

    def of(name: str, prompt: tuple[int, ...], completion: tuple[int, ...], rewards: tuple[float, float]) -> Group:
        made = group(name, rewards)
        fields = {"prompt_ids": prompt, "completion_ids": completion, "logprobs": (-0.5,) * len(completion)}
        samples = tuple(replace(s, **fields) for s in made.samples)
        return Group(Prompt(name, prompt, ""), samples)

    buffer = ReplayBuffer(size=4, seed=0)
    buffer.mix([of("long", tuple(range(20, 50)), (3, 4, 5, 6), (0.0, 1.0))])
    mixed = buffer.mix([of("silent", (7,), (8,), (0.0, 0.0)), of("short", (9, 10), (11,), (0.0, 1.0))])
    assert names(mixed) == ["long", "short"]
    judged = [replace(g, samples=tuple(replace(s, advantage=1.0) for s in g.samples)) for g in mixed]
    batch = pack(judged, max_tokens=1000)
    (micro,) = batch.micro_batches
    seen = {(tuple(context), tuple(targets)) for context, targets in sequences(micro)}
    assert seen == {((*range(20, 50), 3, 4, 5), (3, 4, 5, 6)), ((9, 10), (11,))}
    assert (batch.num_sequences, batch.num_tokens) == (4, 2 * 4 + 2 * 1)


def test_groups_whose_signal_is_not_in_their_totals_are_kept_and_drawn():
    equal = group("given", (1, 1))
    given = replace(equal, samples=tuple(replace(s, advantage=a) for s, a in zip(equal.samples, (1, -2), strict=True)))
    pair = group("pair", (2, 2))
    both = zip(pair.samples, ((0.0, 2.0), (1.0, 0.0)), strict=True)
    mixed = replace(pair, samples=tuple(replace(sample, rewards=rewards) for sample, rewards in both))
    assert (score(given), score(mixed)) == (3.0, 2.0)
    buffer = ReplayBuffer(size=2, seed=0, signal=any_reward_differs)
    assert names(buffer.mix([given, mixed])) == ["given", "pair"]
    assert set(names(buffer.mix([group("x", (0, 0)), group("y", (0, 0))]))) == {"given", "pair"}
