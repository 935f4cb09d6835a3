"""Which sequences go through the model together: all of them once, within the budget, in the cheapest passes found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from lachesis.common.types import Sample, VersionSpan
from lachesis.train.packing import PASS_TOKENS, Row, Unit, arrange, passes_cost, trees

BUDGET = 1000


def rows(lengths: Sequence[Sequence[int]], *, prompt: int, seed: int = 0) -> list[Row]:
    """A sample of each of the lengths, and a prompt for each list of them."""
    drawn = random.Random(seed)
    made = []
    for number, group in enumerate(lengths):
        ids = tuple(drawn.choices(range(1000), k=prompt))
        for length in group:
            completion = tuple(drawn.choices(range(1000), k=length))
            sample = Sample(ids, completion, (0.0,) * length, "stop", VersionSpan(0, 0), advantage=1.0)
            made.append(Row(sample, "sampler", number))
    return made


def arranged(given: Sequence[Row], *, ranks: int = 1, max_rows: int | None = None) -> list[list[Unit]]:
    return arrange([*trees(given)], max_tokens=BUDGET, max_rows=max_rows, share_prefixes=True, ranks=ranks)


def sizes(passes: Sequence[Sequence[Unit]]) -> list[int]:
    return [sum(unit.num_inputs for unit in units) for units in passes]


def test_groups_that_fill_half_of_a_pass_are_split():
    """8 of 508 inputs, of which no two fit into one pass: all but the last passes are nearly full."""
    given = rows([[61] * 8] * 8, prompt=28)
    found = arranged(given)
    assert len(found) == 5 and sum(sizes(found)) == 8 * 508 + 4 * 28
    assert passes_cost(sizes(found), 1) == passes_cost([508] * 8, 1) - 3 * PASS_TOKENS + 4 * 28


def test_a_prompt_that_is_dearer_than_a_pass_stays_whole():
    given = rows([[20] * 8] * 6, prompt=PASS_TOKENS + 1)
    assert sizes(arranged(given)) == [PASS_TOKENS + 1 + 8 * 19] * 6


def test_groups_stay_whole_where_splitting_saves_no_pass():
    given = rows([[31] * 8] * 6, prompt=100)  # three of 340 inputs fit nearly
    found = arranged(given[: 4 * 8])
    assert all(len(unit.parts) == 8 for units in found for unit in units)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_is_lost_or_twice_and_the_budget_is_kept(seed: int, ranks: int):
    drawn = random.Random(seed)
    lengths = [[min(900, round(drawn.lognormvariate(4, 1)) + 1) for _ in range(6)] for _ in range(12)]
    given = rows(lengths, prompt=drawn.randrange(1, 90), seed=seed)
    max_rows = drawn.choice([None, 5, 20])
    found = arranged(given, ranks=ranks, max_rows=max_rows)
    there = Counter(
        id(row.sample) for units in found for unit in units for part in unit.parts for row in part.sequence.rows
    )
    assert there == Counter(id(row.sample) for row in given)
    assert max(sizes(found)) <= BUDGET
    assert max_rows is None or max(sum(unit.num_rows for unit in units) for units in found) <= max_rows
    for unit in (unit for units in found for unit in units):
        before: tuple[int, ...] = ()
        for sequence, shared in unit.parts:
            assert sequence.ids[:shared] == before[:shared], "what is said to be shared is there"
            before = sequence.ids
    assert found == arranged(given, ranks=ranks, max_rows=max_rows)
