"""The model sharded over ranks by PyTorch's FSDP2: each has a part of every parameter, and of all that goes with it.

A decoder layer's parameters are gathered when it runs and, if asked for, let go again until its backward pass; what
is outside of the layers (embeddings, last norm, head; tied ones as one) stays gathered from a pass's forward to its
backward. The policy reads the head's weight itself, so that the whole pass is run as the model's forward
(:func:`~lachesis.train.distributed.strategy.run_within`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from lachesis.common.mesh import Mesh
from lachesis.config.schema import DistributedConfig
from lachesis.train.distributed.strategy import BUFFER_ELEMENTS, FORWARD_METHOD, Ranks, T, by_size, decoder_layers

# The dimension of the mesh over which tensors are cut.
_SHARD = "shard"
# As torch calls it since 2.13, or before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Fsdp2(Ranks):
    """Shards over all ranks, or over groups of ranks that are replicas of one another (HSDP).

    Args:
        device: of this rank.
        config: how to shard.
        buffer_elements: how much is gathered at once; two such buffers are under way at a time.
    """

    sharded = True

    def __init__(
        self, device: torch.device, config: DistributedConfig, *, buffer_elements: int = BUFFER_ELEMENTS
    ) -> None:
        super().__init__(device, config)
        self._buffer_elements = buffer_elements
        self._config = config
        self._device_mesh = _device_mesh(device.type, self.mesh)

    def place(self, model: PreTrainedModel) -> None:
        offloaded = self._config.cpu_offload and self._device.type != "cpu"
        options = {
            "mesh": self._device_mesh,
            "reshard_after_forward": self._config.reshard_after_forward,
            # Whatever the weights are in, ranks' gradients are added up in float32.
            "mp_policy": MixedPrecisionPolicy(
                reduce_dtype=torch.promote_types(model.dtype, torch.float32), cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy() if offloaded else OffloadPolicy(),
        }
        for layer in decoder_layers(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        for module in _sharded_modules(model):
            # The loss is normalized by counts over all ranks: their gradients add up, where FSDP takes the mean.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        setattr(model, FORWARD_METHOD, MethodType(_call, model))
        register_fsdp_forward_method(model, FORWARD_METHOD)
        setattr(model, FORWARD_METHOD, _Resharding(model, getattr(model, FORWARD_METHOD)))

    def whole(self, tensor: Tensor) -> Tensor:
        return next(self.gather([tensor]))

    def gather(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """As :meth:`Strategy.gather`; while one buffer's tensors are used, the next buffer travels."""
        cut = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        whole = _ahead(self._begin(bucket) for bucket in by_size(cut, elements=self._buffer_elements))
        arrived = (tensor for finish in whole for tensor in finish())
        return (next(arrived) if isinstance(tensor, DTensor) else tensor for tensor in tensors)

    @torch.no_grad()
    def _begin(self, bucket: Sequence[DTensor]) -> Callable[[], Iterator[Tensor]]:
        """Send for what other ranks have of some tensors of one dtype; the result waits for it.

        Rank r of n has the rows [r * k, (r + 1) * k) of a tensor [rows, ...], where k = ceil(rows / n); the last ranks
        may have fewer, or none.
        """
        mesh = bucket[0].device_mesh
        assert all(tensor.device_mesh == mesh and tensor.placements[-1] == Shard(0) for tensor in bucket)
        ranks = mesh.size(-1)
        sizes = [-(-tensor.shape[0] // ranks) * tensor.shape[1:].numel() for tensor in bucket]
        own = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=self._device)
        for room, tensor in zip(own.split(sizes), bucket, strict=True):
            local = tensor.to_local().reshape(-1)
            room[: local.numel()].copy_(local)
        buffer = own.new_empty(ranks * own.numel())
        work = _all_gather(buffer, own, group=mesh.get_group(_SHARD), async_op=True)

        def finish() -> Iterator[Tensor]:
            work.wait()
            for part, tensor in zip(buffer.view(ranks, -1).split(sizes, dim=1), bucket, strict=True):
                yield part.flatten()[: tensor.numel()].view(tensor.shape)

        return finish

    @torch.no_grad()
    def spread(self, like: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().spread(like, whole)
        own = whole.to(self._device) if self.rank == 0 else torch.empty_like(whole, device=self._device)
        return distribute_tensor(own, like.device_mesh, like.placements).to(like.device)


def _device_mesh(device_type: str, mesh: Mesh) -> DeviceMesh:
    """The dimensions that FSDP knows of: over which parameters are replicated, if any, and over which they are cut."""
    if mesh.cut == mesh.ranks:
        return init_device_mesh(device_type, (mesh.ranks,), mesh_dim_names=(_SHARD,))
    return init_device_mesh(device_type, (mesh.ranks // mesh.cut, mesh.cut), mesh_dim_names=("replicate", _SHARD))


def _ahead(items: Iterable[T]) -> Iterator[T]:
    """The items; each next one is made before the one before it is used."""
    stream = iter(items)
    held = next(stream, None)
    while held is not None:
        following = next(stream, None)
        yield held
        held = following


def _call(self: torch.nn.Module, function: Callable[[], T]) -> T:
    return function()


class _Resharding:
    """After a pass without gradients nothing else lets go of what is gathered, and a step would leave it stale."""

    def __init__(self, model: torch.nn.Module, run: MethodType) -> None:
        self._modules = _sharded_modules(model)
        self._run = run

    def __call__(self, function: Callable[[], T]) -> T:
        result = self._run(function)
        if not torch.is_grad_enabled():
            for module in self._modules:
                module.reshard()
        return result


def _sharded_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
