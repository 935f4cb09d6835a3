"""The contract of a backend: placement, sharding and reductions. No RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.metrics.values import MetricValue


class Backend(Protocol):
    """How a model lives on one device or many."""

    rank: int
    world_size: int

    def prepare(self, model: PreTrainedModel, *, compile_layers: bool) -> None:
        """Shard or compile in place."""
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
        """Merge metric values over all ranks and reduce them to numbers."""
        ...

    def gather_weights(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Every trained tensor, whole, by name."""
        ...
