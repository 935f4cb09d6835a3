from __future__ import annotations

import pytest

from lachesis.rollouts.tools.memo import Remembered


class Doubles:
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, values: list[int]) -> list[int]:
        self.asked.append(values)
        return [2 * value for value in values]


def test_values_that_are_new_are_asked_for_once_and_together():
    doubles = Doubles()
    remembered = Remembered(doubles, most=8)
    assert remembered([3, 1, 3]) == [6, 2, 6]
    assert remembered([1, 2, 3]) == [2, 4, 6]
    assert remembered([2]) == [4]
    assert remembered([]) == []
    assert doubles.asked == [[3, 1], [2]]


@pytest.mark.parametrize("most", [2, 3])
def test_it_forgets_before_it_keeps_too_many(most: int):
    doubles = Doubles()
    remembered = Remembered(doubles, most=most)
    for values in ([1, 2], [2, 3, 4], [1]):
        assert remembered(values) == [2 * value for value in values]
    assert doubles.asked == [[1, 2], [3, 4], [1]]


def test_keys_stand_for_values_that_cannot_be_hashed():
    lengths: Remembered[list[int], int] = Remembered(lambda lists: [len(one) for one in lists], most=8)
    assert lengths([[1, 2], [3], [1, 2]], keys=["a", "b", "a"]) == [2, 1, 2]
