"""One process, one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.metrics.values import MetricValue, reduce_metrics


class SingleDevice:
    """The strategy for one GPU, or none: nothing is sharded, sums are those of this process."""

    rank = 0
    world_size = 1
    sharded = False

    def place(self, model: PreTrainedModel) -> None:
        return None

    def device(self, model: PreTrainedModel) -> torch.device:
        return next(model.parameters()).device

    def compile(self, model: PreTrainedModel) -> None:
        for layer in decoder_layers(model):
            layer.compile(dynamic=True)

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        return counts

    def max_count(self, count: int) -> int:
        return count

    def gather_values(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, metrics: Mapping[str, MetricValue]) -> dict[str, float]:
        return reduce_metrics(metrics)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        return None

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def spread(self, like: Tensor, whole: Tensor) -> Tensor:
        return whole


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks of a transformer: the members of its longest module list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
