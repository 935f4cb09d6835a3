"""The order of a prefix tree against brute force: all prefixes, counted one by one."""

from __future__ import annotations

import random

import pytest

from lachesis.train.packing import branches, common_length


def prefixes(sequences) -> set[tuple[int, ...]]:
    return {sequence[:length] for sequence in sequences for length in range(1, len(sequence) + 1)}


def common(one, other) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def random_sequences(seed: int) -> list[tuple[int, ...]]:
    """Few different tokens, so that much is shared; some begin with all of another, some are equal, some are empty."""
    draw = random.Random(seed)
    made: list[tuple[int, ...]] = []
    for _ in range(draw.randint(1, 12)):
        base = draw.choice(made)[: draw.randint(0, 30)] if made and draw.random() < 0.7 else ()
        made.append(base + tuple(draw.randint(0, 2) for _ in range(draw.randint(0, 9))))
    return made


@pytest.mark.parametrize("seed", range(40))
def test_distinct_tokens_are_the_prefixes_and_each_shares_the_most_with_the_one_before(seed: int):
    sequences = random_sequences(seed)
    found = branches(sequences)
    assert sorted(branch.index for branch in found) == list(range(len(sequences)))
    assert sum(len(sequences[one.index]) - one.shared for one in branches(sequences)) == len(prefixes(sequences))
    for place, branch in enumerate(found):
        own, before = sequences[branch.index], [sequences[other.index] for other in found[:place]]
        assert branch.shared == max((common(own, other) for other in before), default=0)
        assert not before or branch.shared == common(own, before[-1])


def test_beginnings_come_first_and_equal_ones_as_they_were_given():
    sequences = [(5, 1), (3, 1, 2), (5, 9), (3, 1), (5, 1)]
    assert branches(sequences) == [(3, 0), (1, 2), (0, 0), (4, 2), (2, 1)]
    assert branches([]) == []


@pytest.mark.parametrize("length", [0, 1, 2, 7, 1000])
def test_common_lengths_are_found_wherever_the_difference_is(length: int):
    one = tuple(range(length))
    for place in {0, length // 3, max(0, length - 1)}:
        other = one[:place] + (-1,) * (length - place)
        assert common_length(one, other) == common(one, other)
    assert common_length(one, (*one, 5)) == length
