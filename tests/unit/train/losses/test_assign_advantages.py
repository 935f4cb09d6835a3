from __future__ import annotations

import pytest

from lachesis.common.errors import RewardError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.losses.advantage import assign_advantages


def group(name: str, *rewards: tuple[float | None, ...]) -> Group:
    samples = tuple(
        Sample((1, 2), (index,), (-0.5,), "stop", VersionSpan(0, 0), text=f"{name}{index}", rewards=row)
        for index, row in enumerate(rewards)
    )
    return Group(prompt=Prompt(id=name, token_ids=(1, 2), text=name), samples=samples)


def test_the_function_sees_all_rewards_and_whose_they_are():
    seen = {}

    def compute(rewards, number, lengths):
        seen.update(rewards=rewards, number=number, lengths=lengths)
        return [0.0] * len(rewards)

    assign_advantages([group("a", (1.0, None), (0.0, 2.0)), group("b", (None, None))], compute=compute)
    assert list(seen["rewards"]) == [(1.0, None), (0.0, 2.0), (None, None)]
    assert list(seen["number"]) == [0, 0, 1]
    assert list(seen["lengths"]) == [1, 1, 1]


def test_each_sample_gets_its_own_advantage_and_nothing_else_changes():
    groups = [group("a", (1.0,), (0.0,)), group("b", (0.5,), (0.25,), (0.0,))]
    scored = assign_advantages(
        groups, compute=lambda rewards, number, lengths: [float(10 + i) for i in range(len(rewards))]
    )
    assert [[s.advantage for s in g.samples] for g in scored] == [[10.0, 11.0], [12.0, 13.0, 14.0]]
    assert [g.prompt for g in scored] == [g.prompt for g in groups]
    assert [[(s.text, s.rewards) for s in g.samples] for g in scored] == [
        [(s.text, s.rewards) for s in g.samples] for g in groups
    ]
    assert all(s.advantage is None for g in groups for s in g.samples), "the groups given are left as they are"


@pytest.mark.parametrize("advantages", [[1.0], [1.0, 2.0, 3.0]], ids=["too few", "too many"])
def test_another_number_of_advantages_is_not_accepted(advantages):
    with pytest.raises(ValueError, match="zip"):
        assign_advantages([group("a", (1.0,), (0.0,))], compute=lambda rewards, number, lengths: advantages)


def test_where_nothing_was_judged_there_is_nothing_to_learn():
    groups = [group("a", (None, None), (None, None)), group("b", (None, None))]
    with pytest.raises(RewardError, match="abstained on all 3 completions") as caught:
        assign_advantages(groups, compute=lambda rewards, number, lengths: [0.0] * len(rewards))
    assert caught.value.remedy


def test_no_groups_give_none():
    assert assign_advantages([], compute=lambda rewards, number, lengths: []) == []
