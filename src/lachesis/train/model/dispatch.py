"""Expert parallelism: each rank has some experts of every layer, and tokens travel to their experts.

As in GShard (arXiv 2006.16668), without a capacity: a rank sends each of its tokens once to each of the experts that
its router has chosen, computes its own experts for whatever arrives, and weights the returned results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lachesis.train.model.rank_group import RankGroup

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of a rank's experts: from states [rows, H], experts [rows, 1] and weights [rows, 1] to results [rows, H]."""


class ExpertGroup(RankGroup):
    """Group of ranks that share the experts of each layer equally."""

    __slots__ = ()

    def dispatched(self, states: Tensor, chosen: Tensor, weights: Tensor, *, experts: int, compute: Compute) -> Tensor:
        """Return the output of a layer's ``experts`` for a rank's tokens, each a sum over the token's experts.

        Args:
            states: [n, H].
            chosen: int64 [n, k], of all experts.
            weights: [n, k].
            compute: this rank's own experts, counted from 0.

        Returns:
            [n, H].
        """
        each, own = chosen.shape[1], experts // self.size
        order = torch.argsort(chosen.reshape(-1), stable=True)
        sent = torch.bincount(chosen.reshape(-1), minlength=experts).view(self.size, own)
        received = self.exchange(sent, [1] * self.size, [1] * self.size)
        leave, arrive = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        rows = self.exchange(states.index_select(0, order // each), leave, arrive)
        numbers = torch.arange(own, device=rows.device).repeat(self.size)
        numbers = numbers.repeat_interleave(received.reshape(-1), output_size=len(rows))
        back = self.exchange(_computed(compute, rows, numbers), arrive, leave)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (back.index_select(0, place).unflatten(0, (-1, each)) * weights.unsqueeze(-1)).sum(1)


def _computed(compute: Compute, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the experts' unweighted outputs.

    If no token has arrived, a row of zeros is computed and left out: in the backward pass others wait for this rank's
    gradients.
    """
    given = rows if len(rows) else rows.sum(0, keepdim=True)
    chosen = numbers if len(rows) else numbers.new_zeros(1)
    return compute(given, chosen[:, None], given.new_ones(len(given), 1))[: len(rows)]
