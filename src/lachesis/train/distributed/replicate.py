"""The whole model on every rank; gradients are added up before each step (data-parallel training)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from lachesis.train.distributed.ranks import Ranks

# Gradients are added up in buffers of about this many elements: one collective for many small tensors.
_BUFFER_ELEMENTS = 2**25


class Replicate(Ranks):
    """Equal replicas. They begin with rank 0's weights, and equal gradients keep them equal."""

    sharded = False

    @torch.no_grad()
    def place(self, model: PreTrainedModel) -> None:
        model.to(self._device)  # type: ignore[arg-type]
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for group in _by_size(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in group])
            # 16-bit sums would lose what a rank adds.
            total = flat.to(torch.promote_types(flat.dtype, torch.float32))
            dist.all_reduce(total)
            parts = total.split([gradient.numel() for gradient in group])
            for gradient, part in zip(group, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor


def _by_size(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of one dtype, of at most :data:`_BUFFER_ELEMENTS` elements or a single tensor."""
    group: list[Tensor] = []
    held = 0
    for gradient in gradients:
        full = held + gradient.numel() > _BUFFER_ELEMENTS
        if group and (full or gradient.dtype != group[0].dtype):
            yield group
            group, held = [], 0
        group.append(gradient)
        held += gradient.numel()
    if group:
        yield group
