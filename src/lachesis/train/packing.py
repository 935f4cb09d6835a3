"""Packing of samples: trees of shared prefixes, distributed over passes with a budget.

A group stays one tree unless cutting it helps. If no whole group fits into the remaining room, groups are split between
passes, and prefixes shared across a split are computed in both, provided that all passes together cost less, counting
tokens and a fixed cost a pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import Sample

OldLogprobs = Literal["sampler", "trainer"]
"""Old policy of the importance ratio: the samples' own logprobs, or the trainer's at first use."""
# What a pass costs beside its tokens, in tokens: weights are read twice, gradients added to, kernels launched. At 1.5B
# on an H200 it was as much as 360 to 650 tokens (benchmarks/RESULTS.md: one step in 1, 2, 4 and 8 passes); for larger
# models it is 210 to 300 by 12 bytes a weight at the memory's speed, over 6 FLOP a weight and token.
PASS_TOKENS = 384
# Factors of the smaller budgets tried for several ranks; the even budget leaves no room for unequal lengths.
_SLACK = (1.0, 1.1, 1.25, 1.5)

Tokens = tuple[int, ...]


class Shares(NamedTuple):
    """Weights of the rewards' and of a teacher's part in a group's loss, and that teacher's number among several."""

    reward: float = 1.0
    teacher: float = 1.0
    number: int = 0


class Row(NamedTuple):
    """Sample of the batch, with the origin of its old logprobs, its group's number, loss weights and images."""

    sample: Sample
    old_logprobs: OldLogprobs
    group: int
    shares: Shares = Shares()
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """Model inputs of samples with equal predictions; the last token is not an input."""

    ids: tuple[int, ...]
    prompt_tokens: int
    rows: tuple[Row, ...]


class Part(NamedTuple):
    """Sequence in a unit, and the number of first inputs that it shares with its predecessor."""

    sequence: Inputs
    shared: int

    @property
    def new(self) -> int:
        return len(self.sequence.ids) - self.shared


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences in the order of their prefix tree, which packing moves together."""

    parts: tuple[Part, ...]
    num_inputs: int = field(init=False)

    def __post_init__(self) -> None:
        # Computed once, because packing reads it many times.
        object.__setattr__(self, "num_inputs", sum(part.new for part in self.parts))

    @property
    def num_rows(self) -> int:
        """Return the number of sequences that go through the model; equal ones count once."""
        return len(self.parts)


@dataclass(slots=True)
class _Pass:
    """Inputs collected for one pass through the model."""

    units: list[Unit] = field(default_factory=list[Unit])
    tokens: int = 0
    rows: int = 0

    def add(self, unit: Unit) -> None:
        self.units.append(unit)
        self.tokens += unit.num_inputs
        self.rows += unit.num_rows


class _Budget(NamedTuple):
    """Limits of a pass."""

    tokens: int
    rows: float

    def fitting(self, unit: Unit, passes: Sequence[_Pass]) -> _Pass | None:
        """Return the first of the passes that has room for all of a unit."""
        tokens, rows = self.tokens - unit.num_inputs, self.rows - unit.num_rows
        return next((one for one in passes if one.tokens <= tokens and one.rows <= rows), None)


def trees(rows: Sequence[Row]) -> Iterator[Unit]:
    """Yield a prefix tree for each group, and one for those that have a prompt in common."""
    grown: dict[int, dict[tuple, list[Row]]] = {}
    tree_of: dict[int | tuple[tuple[int, ...], int], int] = {}
    for row in rows:
        sample = row.sample
        prompt = (sample.prompt_ids, id(row.images))  # pictures of one size have equal tokens
        tree = tree_of.get(row.group, tree_of.get(prompt, row.group))
        tree_of[row.group] = tree_of[prompt] = tree
        # Samples with other loss masks, temperatures, teachers or images have other predictions: no duplicates.
        other = (sample.mask, sample.temperature, sample.teacher_prompt_ids, *map(id, sample.images))
        key = (sample.prompt_ids, sample.completion_ids, *other)
        grown.setdefault(tree, {}).setdefault(key, []).append(row)
    for tree in grown.values():
        sequences = [Inputs(p + c[:-1], len(p), tuple(same)) for (p, c, *_), same in tree.items()]
        order = branches([sequence.ids for sequence in sequences])
        yield Unit(tuple(Part(sequences[branch.index], branch.shared) for branch in order))


def arrange(
    whole: Sequence[Unit], *, max_tokens: int, max_rows: int | None, share_prefixes: bool, ranks: int
) -> list[list[Unit]]:
    """Return the units of each pass, for all trees of ``whole``, in the cheapest of a few ways.

    The ways are whole groups, and groups that are split where room is left. For several ranks both are also tried with
    smaller budgets that give every rank equal work, so that none idles.

    Args:
        max_tokens: inputs of a pass at most; a sequence that is longer goes alone.
        max_rows: sequences of a pass at most.
        share_prefixes: ``False`` makes each sample a unit of its own, with its whole sequence.
        ranks: number of ranks, each with one pass at a time.
    """

    def ways(tokens: int) -> list[list[_Pass]]:
        budget = _Budget(tokens, math.inf if max_rows is None else max_rows)
        cut = partial(_cut, budget=budget) if share_prefixes else flat
        units = [unit for tree in whole for unit in cut(tree)]
        filled = [_filled(units, budget=budget, split=False)]
        least = -(-sum(one.tokens for one in filled[0]) // tokens)
        if share_prefixes and len(filled[0]) > least:
            filled.append(_filled(units, budget=budget, split=True))
        return filled

    found = ways(max_tokens)
    if ranks > 1 and found[0]:
        even = min(_even_budget(passes, ranks) for passes in found)
        for tokens in {min(max_tokens, round(even * slack)): None for slack in _SLACK}:
            found += ways(tokens)
    best = min(found, key=lambda passes: passes_cost([one.tokens for one in passes], ranks))
    return [one.units for one in best]


def passes_cost(sizes: Sequence[int], ranks: int) -> int:
    """Return the cost in tokens of passes of these sizes: ranks wait for the largest of the passes made together."""
    return sum(max(sizes[start : start + ranks]) + PASS_TOKENS for start in range(0, len(sizes), ranks))


def _even_budget(passes: Sequence[_Pass], ranks: int) -> int:
    """Return the tokens of each pass that keep all ranks busy equally often."""
    rounds = -(-len(passes) // ranks)
    return -(-sum(one.tokens for one in passes) // (rounds * ranks))


def _filled(units: Sequence[Unit], *, budget: _Budget, split: bool) -> list[_Pass]:
    """Pack by first-fit decreasing, by inputs (and rows).

    The longest come first, so that sequences of one length meet and the last pass is as full as possible.

    Args:
        split: a unit that fits nowhere gives as many sequences as fit to the pass with the most room.
    """
    passes: list[_Pass] = []
    waiting = deque(sorted(units, key=lambda unit: unit.num_inputs, reverse=True))
    while waiting:
        unit = waiting.popleft()
        fitting = budget.fitting(unit, passes)
        if fitting is None and split and passes:
            roomiest = min(passes, key=lambda one: one.tokens)
            pieces = _split(unit, tokens=budget.tokens - roomiest.tokens, rows=budget.rows - roomiest.rows)
            if pieces is not None:
                fitting, unit = roomiest, pieces[0]
                waiting.appendleft(pieces[1])
        if fitting is None:
            passes.append(fitting := _Pass())
        fitting.add(unit)
    return passes


def _split(unit: Unit, *, tokens: int, rows: float) -> tuple[Unit, Unit] | None:
    """Split a unit into as many sequences as fit, and the others; ``None`` if that gains nothing.

    It gains nothing if more is recomputed than is moved, or more than a pass's fixed cost.
    """
    ends = accumulate(part.new for part in unit.parts)
    count = sum(number < rows and end <= tokens for number, end in enumerate(ends))
    if count == 0:
        return None
    head, (first, *others) = Unit(unit.parts[:count]), unit.parts[count:]
    if first.shared > min(PASS_TOKENS, head.num_inputs - first.shared):
        return None
    return head, Unit((first._replace(shared=0), *others))


def flat(tree: Unit) -> Iterator[Unit]:
    """Yield each sample alone, with its whole sequence."""
    for sequence, _ in tree.parts:
        yield from (Unit((Part(dataclasses.replace(sequence, rows=(row,)), 0),)) for row in sequence.rows)


def _cut(tree: Unit, *, budget: _Budget) -> Iterator[Unit]:
    """Yield the tree in units that fit a pass, cut also where nothing is shared."""
    kept: list[Part] = []
    inputs = 0
    for part in tree.parts:
        full = inputs + part.new > budget.tokens or len(kept) == budget.rows
        if kept and (full or not part.shared):
            yield Unit(tuple(kept))
            kept, inputs = [], 0
        kept.append(part if kept else part._replace(shared=0))
        inputs += kept[-1].new
    yield Unit(tuple(kept))


class Branch(NamedTuple):
    """Place of a sequence in a prefix tree: its ``index``, and its number of tokens shared with its predecessor."""

    index: int
    shared: int


def branches(sequences: Sequence[Tokens]) -> list[Branch]:
    """Return the sequences in lexicographic order, which is a depth-first order of their prefix tree.

    In that order ``shared`` is the longest prefix that a sequence shares with any earlier one, so Σ(length - shared) is
    the number of nodes of the tree: of tokens that differ, or follow different ones. A sequence comes before those that
    it is a prefix of.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    before = [(), *(sequences[index] for index in order)]
    return [Branch(index, common_length(sequences[index], last)) for index, last in zip(order, before, strict=False)]


def common_length(one: Tokens, other: Tokens) -> int:
    """Return the number of first tokens that two sequences have in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # equal before low, not all equal before high
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
