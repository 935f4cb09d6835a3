"""A batch over ranks: nothing is lost, and no rank waits more than it has to."""

from __future__ import annotations

import pytest

from lachesis.train.batch import pack
from lachesis.train.distributed.split import collect, deal, pack_for_ranks, passes_cost, split
from tests.unit.train.model.test_forward import random_groups

GROUPS = random_groups(groups=5, samples=4, longest=8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50])
def test_parts_are_the_whole(ranks: int):
    batch = pack(GROUPS, max_tokens=20)
    parts = split(batch, ranks)
    assert len(parts) == ranks
    assert collect([part.micro_batches for part in parts]) == list(batch.micro_batches)
    counts = [len(part.micro_batches) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert sum(part.num_sequences for part in parts) == batch.num_sequences
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert parts[0].groups == batch.groups
    assert all(part.groups == () for part in parts[1:])


def test_uses_of_a_batch_are_told():
    import dataclasses

    batch = dataclasses.replace(pack(GROUPS, max_tokens=20), iteration=1, num_iterations=3)
    assert {(part.iteration, part.num_iterations) for part in split(batch, 2)} == {(1, 3)}


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_what_is_dealt_is_collected_in_its_order(count: int):
    assert collect(deal(list(range(count)), 3)) == list(range(count))


def test_a_pass_takes_as_long_as_its_largest():
    batch = pack(GROUPS, max_tokens=20)
    sizes = [micro.num_inputs for micro in batch.micro_batches]
    assert passes_cost(batch, 1) == sum(sizes)
    assert passes_cost(batch, len(sizes)) == max(sizes)


def test_one_micro_batch_is_cut_for_the_ranks_that_would_have_none():
    alone = pack_for_ranks(GROUPS, ranks=1, max_tokens=1 << 20)
    assert len(alone.micro_batches) == 1
    halves = pack_for_ranks(GROUPS, ranks=2, max_tokens=1 << 20)
    assert len(halves.micro_batches) >= 2
    assert passes_cost(halves, 2) < passes_cost(alone, 2)
    assert (halves.num_tokens, halves.num_sequences) == (alone.num_tokens, alone.num_sequences)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("max_tokens", [15, 30, 60, 200])
def test_micro_batches_for_ranks_are_within_the_budget_and_never_slower(ranks: int, max_tokens: int):
    plain, found = (pack_for_ranks(GROUPS, ranks=n, max_tokens=max_tokens) for n in (1, ranks))
    assert all(micro.num_inputs <= max_tokens for micro in found.micro_batches)
    assert passes_cost(found, ranks) <= passes_cost(plain, ranks)


def test_nothing_to_learn_is_no_micro_batch():
    from tests.unit.train.test_policy import without_advantage

    packed = pack_for_ranks(without_advantage(GROUPS), ranks=2, max_tokens=100, skip_zero_advantage=True)
    assert packed.micro_batches == ()
