"""Who of several ranks sends what."""

from __future__ import annotations

import random

import pytest

from lachesis.bridges.senders import busy_senders, deal, spread_ranks
from lachesis.transport.layout import BUCKET_BYTES


@pytest.mark.parametrize(
    ("ranks", "most", "expected"),
    [(1, 8, (0,)), (4, 8, (0, 1, 2, 3)), (4, 1, (0,)), (16, 4, (0, 4, 8, 12)), (12, 8, (0, 1, 3, 4, 6, 7, 9, 10))],
)
def test_senders_are_spread_over_all_ranks(ranks: int, most: int, expected: tuple[int, ...]):
    assert spread_ranks(ranks, most=most) == expected


@pytest.mark.parametrize("seed", range(30))
def test_every_parameter_is_sent_once_in_order_and_shares_are_even(seed: int):
    source = random.Random(seed)
    sizes = {f"p{i}": source.choice((1, 300, source.randrange(1, 5000))) for i in range(source.randrange(1, 60))}
    senders = busy_senders(sizes, candidates=sorted(source.sample(range(20), source.randrange(1, 9))))
    parts = deal(sizes, senders=senders)
    assert [name for part in parts for name in part.names] == [*sizes]
    assert {part.sender for part in parts} == set(senders), "each of them has something to send"
    loads = [sum(sizes[name] for part in parts if part.sender == rank for name in part.names) for rank in senders]
    largest = max(sum(sizes[name] for name in part.names) for part in parts)
    assert max(loads) - min(loads) <= largest


def test_a_part_is_a_bucket_or_one_parameter():
    sizes = {"embedding": 3 * BUCKET_BYTES, **{f"layer{i}": BUCKET_BYTES // 2 for i in range(8)}}
    parts = deal(sizes, senders=(0, 4))
    assert [part.names for part in parts[:2]] == [("embedding",), ("layer0", "layer1")]
    assert [part.sender for part in parts] == [0, 4, 4, 4, 0]


def test_few_parameters_have_few_senders():
    assert busy_senders({"a": 10, "b": 10}, candidates=(0, 1, 2, 3)) == (0, 1)
    assert busy_senders({"a": 10}, candidates=(0, 1, 2, 3)) == (0,)
