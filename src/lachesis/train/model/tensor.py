"""Tensor parallelism: several ranks compute all tokens of a micro-batch, each with its part of a layer's matrices.

Of attention and of a feed-forward block a rank has whole heads and whole hidden units: the rows of the matrices that
lead to them (*colwise*, by their outputs) and the columns of the one that leads away from them (*rowwise*, by its
inputs), as in Megatron-LM (arXiv 1909.08053, section 3). What comes in is alike on all ranks, so that its gradients are
added up; what goes out is a sum over them. Outside of the layers all is alike, but that each rank takes its share of
the predictions through the head, whose weight it has whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lachesis.train.model.rank_group import RankGroup


class TensorGroup(RankGroup):
    """Group of ranks that share the matrices of each layer."""

    __slots__ = ()

    def enter(self, states: Tensor) -> Tensor:
        """Pass on states that are alike on all ranks; their gradient is the sum of the ranks' gradients."""
        return _enter(states, self.group)

    def leave(self, states: Tensor) -> Tensor:
        """Return the sum of the ranks' states; its gradient is alike on all of them."""
        return _leave(states, self.group)

    def deal(self, values: Tensor, numbers: slice) -> tuple[Tensor, slice]:
        """Return this rank's share of values [m, ...] of the predictions ``numbers``, and its slice of them."""
        own = self.slice_of(len(values))
        return self.enter(values)[own], slice(numbers.start + own.start, numbers.start + own.stop)


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """Return the values, and multiply their gradient on its way back."""
    scaled: Any = _ScaledGradient.apply(values, factor)
    return scaled


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy: activation checkpointing may keep what was given, and autograd may give a gradient to others too.
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# Not a part of compiled graphs: they wait for other ranks.
_enter: Any = torch.compiler.disable(_Enter.apply)
_leave: Any = torch.compiler.disable(_Leave.apply)
