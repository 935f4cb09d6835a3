"""One process, one device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.metrics.values import MetricValue, reduce_metrics


class SingleDevice:
    """The backend for one GPU, or none: nothing is sharded, sums are those of this process."""

    rank = 0
    world_size = 1

    def prepare(self, model: PreTrainedModel, *, compile_layers: bool) -> None:
        if compile_layers:
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

    def gather_weights(self, model: torch.nn.Module) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks of a transformer: the members of its longest module list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
