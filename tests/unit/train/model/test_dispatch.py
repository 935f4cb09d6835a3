"""Tokens that travel to their experts. Ranks are threads here; that they then learn as one is in `ranks_program.py`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from lachesis.train.model.dispatch import ExpertGroup, _computed

EXPERTS, HIDDEN, EACH, RANKS = 6, 4, 2, 3


class Meeting:
    """Where threads give each other rows."""

    def __init__(self, ranks: int) -> None:
        self.board: dict[int, Sequence[Tensor]] = {}
        self.barrier = threading.Barrier(ranks, timeout=10)


class Met(ExpertGroup):
    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        meeting: Any = self.group
        meeting.board[self.rank] = rows.split([*sent])
        meeting.barrier.wait()
        arrived = [meeting.board[rank][self.rank] for rank in range(self.size)]
        meeting.barrier.wait()
        assert [len(part) for part in arrived] == [*received]
        return torch.cat(arrived)


def directly(states: Tensor, chosen: Tensor, weights: Tensor, *, matrices: Tensor) -> Tensor:
    """[n, H]: the sum over a token's experts of its states times their matrix, weighted."""
    return (torch.einsum("nh,nkhd->nkd", states, matrices[chosen]) * weights[..., None]).sum(1)


@pytest.mark.parametrize("favourites", [range(EXPERTS), (0, 1), (4, 5)], ids=["all", "first rank's", "last rank's"])
def test_tokens_find_their_experts_and_come_back_weighted(favourites: Sequence[int]):
    """A rank has no tokens, and to some ranks none come: they compute a row of zeros, whose result nobody gets."""
    drawn = torch.Generator().manual_seed(0)
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=drawn).double()
    liking = torch.full((EXPERTS,), 1e-9).index_fill(0, torch.tensor([*favourites]), 1.0)
    given = []
    for tokens in (5, 0, 7):
        chosen = torch.multinomial(liking.expand(max(tokens, 1), -1), EACH, generator=drawn)[:tokens]
        states, weights = (torch.randn(tokens, n, generator=drawn).double() for n in (HIDDEN, EACH))
        given.append((states, chosen, weights))
    meeting: Any = Meeting(RANKS)
    computed: dict[int, int] = {}

    def run(rank: int) -> Tensor:
        own = matrices.chunk(RANKS)[rank]

        def compute(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            assert torch.equal(weights, torch.ones_like(weights))
            computed[rank] = len(states)
            return directly(states, chosen, weights, matrices=own)

        return Met(rank, RANKS, meeting).dispatched(*given[rank], experts=EXPERTS, compute=compute)

    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(run, range(RANKS)))
    for result, arguments in zip(found, given, strict=True):
        torch.testing.assert_close(result, directly(*arguments, matrices=matrices))
    per_rank = torch.bincount(torch.cat([c.flatten() for _, c, _ in given]) // (EXPERTS // RANKS), minlength=RANKS)
    assert [computed[rank] for rank in range(RANKS)] == [max(1, n) for n in per_rank.tolist()]


def test_where_no_token_arrives_gradients_go_back_still():
    """Others wait for them: for those of the experts, and for the rows that travel back."""
    rows, matrix = torch.zeros(0, HIDDEN, requires_grad=True), torch.ones(HIDDEN, HIDDEN, requires_grad=True)

    def compute(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        assert chosen.tolist() == [[0]]
        return states @ matrix

    found = _computed(compute, rows, torch.zeros(0, dtype=torch.int64))
    assert found.shape == (0, HIDDEN)
    found.sum().backward()
    assert rows.grad is not None
    assert torch.equal(matrix.grad, torch.zeros_like(matrix))
