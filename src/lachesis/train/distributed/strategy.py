"""How a model lives on one device or many: placement, sharding and reductions. No RL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.metrics.values import MetricValue


class Strategy(Protocol):
    """How a model lives on one device or many.

    Ranks call the methods together and in the same order; those that only look at this process say so.
    """

    rank: int
    world_size: int

    @property
    def sharded(self) -> bool:
        """Whether a parameter is cut over ranks, so that none of them has it whole. Of this process alone."""
        ...

    def place(self, model: PreTrainedModel) -> None:
        """Bring the model to where it is trained, sharded in place where it is; before anything runs it."""
        ...

    def device(self, model: PreTrainedModel) -> torch.device:
        """Where the model computes, which with offloaded parameters is not where they are. Of this process alone."""
        ...

    def compile(self, model: PreTrainedModel) -> None:
        """Compile the decoder layers in place; of this process alone."""
        ...

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        """Sum integer counts over all ranks."""
        ...

    def max_count(self, count: int) -> int:
        """The largest of a count over all ranks: how often each has to take part in what all do together."""
        ...

    def gather_values(self, values: Tensor) -> Tensor:
        """The values [n] of all ranks, one after the other; ranks may have any number of them."""
        ...

    def reduce(self, metrics: Mapping[str, MetricValue]) -> dict[str, float]:
        """Reduce metric values, which are of all ranks already, to numbers. Of this process alone."""
        ...

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Leave in each ``.grad`` the sum over all ranks, where the backward pass has not done so."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of the model; the tensor itself where it is not sharded. Only rank 0 may use the result."""
        ...

    def spread(self, like: Tensor, whole: Tensor) -> Tensor:
        """The reverse: what this rank has to copy into ``like``.

        Other ranks than 0 may give a tensor of the same shape and dtype on the meta device.
        """
        ...


Function = Callable[[], tuple[Tensor, ...]]
# The method that a strategy gives a model whose parameters are whole during its forward only.
FORWARD_METHOD = "run_within"


def run_within(model: torch.nn.Module, function: Function) -> tuple[Tensor, ...]:
    """``function()``, in which the model's own parameters (embeddings, head) are whole, as they are in its forward.

    Where they always are, that is all. The tensors that it returns are those that a backward pass begins from.
    """
    run = getattr(model, FORWARD_METHOD, None)
    return function() if run is None else run(function)
