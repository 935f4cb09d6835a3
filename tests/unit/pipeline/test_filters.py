from __future__ import annotations

from dataclasses import replace

import pytest

from lachesis.common.types import Group
from lachesis.pipeline.filters import any_reward_differs, failed_entirely, has_signal
from tests.unit.pipeline.sources import group


@pytest.mark.parametrize(
    ("rewards", "signal", "failed"),
    [
        ((0.0, 1.0), True, False),
        ((1.0, 1.0), False, False),
        ((0.0, 0.0), False, True),
        ((0.0, None, 0.0), False, True),
        ((1.0, None), False, False),
        ((None, None), False, False),
        ((None, 0.5, 0.25), True, False),
        ((), False, False),
        ((1e-9, -1e-9), True, True),
    ],
)
def test_what_teaches_and_what_failed(rewards, signal, failed):
    assert (has_signal(group("a", rewards)), failed_entirely(group("a", rewards))) == (signal, failed)


def test_advantages_that_were_given_are_signal():
    equal = group("a", (1, 1))
    first, second = equal.samples
    assert has_signal(replace(equal, samples=(replace(first, advantage=0.5), second)))
    assert has_signal(replace(equal, samples=(replace(first, token_advantages=(0.0, -1.0)), second)))
    assert not has_signal(replace(equal, samples=(replace(first, advantage=0.0), second)))


def test_equal_totals_of_different_rewards_are_signal_where_each_is_normalized_alone():
    """GDPO: z-scores of each function are added up with its weight, so 2·0 + 1·2 and 2·1 + 1·0 are not alike."""
    first, second = group("a", (2, 2)).samples
    mixed = Group(
        prompt=group("a", (2, 2)).prompt,
        samples=(replace(first, rewards=(0.0, 2.0)), replace(second, rewards=(1.0, 0.0))),
    )
    assert not has_signal(mixed)
    assert any_reward_differs(mixed)
    assert not any_reward_differs(group("a", (2, 2)))
