"""Prefix trees of token sequences, in the order in which each shares the most with the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Tokens = tuple[int, ...]


class Branch(NamedTuple):
    """Place of a sequence in a prefix tree: its ``index``, and how many first tokens it shares with the one before."""

    index: int
    shared: int


def branches(sequences: Sequence[Tokens]) -> list[Branch]:
    """Return the sequences in lexicographic order, which is a depth-first order of their prefix tree.

    In that order ``shared`` is all that a sequence has in common with any before it, so that Σ(length - shared) is the
    number of nodes of the tree: of distinct tokens, where a token is one with all that comes before it. One that is the
    beginning of another comes before it.
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
