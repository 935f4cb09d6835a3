"""What strategies of several ranks have in common: sums and counts over all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.metrics.values import MetricValue, reduce_metrics
from lachesis.train.distributed.single import decoder_layers


class Ranks:
    """Collectives over the group of all ranks, which has to exist.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def device(self, model: PreTrainedModel) -> torch.device:
        return self._device

    def compile(self, model: PreTrainedModel) -> None:
        for layer in decoder_layers(model):
            # The forward alone: hooks around it gather parameters, which is no part of a graph.
            layer.forward = torch.compile(layer.forward, dynamic=True)

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        total = torch.tensor(counts, dtype=torch.int64, device=self._device)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def max_count(self, count: int) -> int:
        largest = torch.tensor([count], dtype=torch.int64, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())

    def gather_values(self, values: Tensor) -> Tensor:
        own = torch.tensor([values.numel()], dtype=torch.int64, device=self._device)
        counts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(counts, own)
        lengths = [int(count.item()) for count in counts]
        padded = values.new_zeros(max(lengths))
        padded[: values.numel()] = values
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def reduce(self, metrics: Mapping[str, MetricValue]) -> dict[str, float]:
        return reduce_metrics(metrics)

    @torch.no_grad()
    def spread(self, like: Tensor, whole: Tensor) -> Tensor:
        own = whole.to(self._device) if self.rank == 0 else torch.empty_like(whole, device=self._device)
        dist.broadcast(own, src=0)
        return own
