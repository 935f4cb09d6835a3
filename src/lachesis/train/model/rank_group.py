"""Groups of ranks that compute one micro-batch together, and their exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Torch's name for it since 2.13, or its earlier name.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """Group of ranks, in which this is ``rank`` of ``size``; all call its methods together."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def gather(self, own: Tensor, *, total: int) -> Tensor:
        """Gather all of ``total`` values that are dealt out evenly and in order, from this rank's own.

        Differentiable in this rank's own values, for a loss that each rank computes as a whole.
        """
        whole: Any = _Gather.apply(own, total, self)
        return whole

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows [rows, ...], with numbers ``sent`` and ``received`` by rank; gradients travel back."""
        return _exchange(rows, [*sent], [*received], self.group)

    def part(self, number: int) -> int:
        """Return how many of a number of items each rank has; the last ranks may have fewer, or none."""
        return -(-number // self.size)

    def slice_of(self, number: int) -> slice:
        """Return this rank's share of a number of items that are dealt out evenly and in order."""
        part = self.part(number)
        return slice(min(self.rank * part, number), min((self.rank + 1) * part, number))


class _Gather(torch.autograd.Function):
    """Gather of ``total`` rows; only a rank's own get a gradient, not padding beyond the end."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, total: int, group: RankGroup) -> Tensor:
        part = group.part(total)
        ctx.given, ctx.own = len(own), group.slice_of(total)
        padded = own.new_zeros((part, *own.shape[1:]))
        padded[: len(own)] = own
        whole = own.new_empty((group.size * part, *own.shape[1:]))
        _all_gather(whole, padded, group=group.group)
        # FSDP's hooks do not accept a view.
        return whole if len(whole) == total else whole[:total].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = grads[0][ctx.own]
        return torch.cat([own, own.new_zeros((ctx.given - len(own), *own.shape[1:]))]), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


# Not part of compiled graphs, because it waits for other ranks.
_exchange: Any = torch.compiler.disable(_AllToAll.apply)
