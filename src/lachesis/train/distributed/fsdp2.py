"""Sharding of the model over ranks by PyTorch's FSDP2: each has a part of every parameter and of its states.

A decoder layer's parameters are gathered when it runs and, if requested, released until its backward pass; everything
outside the layers (embeddings, last norm, head; tied ones as one) stays gathered from a pass's forward to its backward.
The policy reads the head's weight itself, so the whole pass runs as the model's forward
(:func:`~lachesis.train.distributed.strategy.run_within`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from lachesis.config.schema import DistributedConfig
from lachesis.config.schema.mesh import Mesh, require_experts
from lachesis.engines.embedded.experts import stacked_experts
from lachesis.train.distributed.expert_parallel import EXPERT, ExpertCut, is_dealt_out
from lachesis.train.distributed.sharded_checkpoint import sharded_as
from lachesis.train.distributed.strategy import (
    BUFFER_ELEMENTS,
    FORWARD_METHOD,
    Ranks,
    T,
    by_size,
    decoder_layers,
    rank_group,
)
from lachesis.train.model.dispatch import ExpertGroup
from lachesis.train.model.experts import experts_of
from lachesis.transport.digest import Share

# The dimension of a mesh over which FSDP cuts tensors.
_SHARD = "shard"
# Torch's name for it since 2.13, or its earlier name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Fsdp2(Ranks):
    """Sharding over all ranks, or over groups of ranks that are replicas of one another (HSDP).

    Args:
        device: of this rank.
        config: how to shard.
        buffer_elements: number of elements gathered at once; two such buffers are in flight.
    """

    sharded = True

    def __init__(
        self, device: torch.device, config: DistributedConfig, *, buffer_elements: int = BUFFER_ELEMENTS
    ) -> None:
        super().__init__(device, config)
        self._buffer_elements = buffer_elements
        self._config = config
        self._meshes = _meshes(device.type, self.mesh)
        self._replicated: list[FSDPModule] = []

    def place(self, model: PreTrainedModel) -> None:
        offloaded = self._config.cpu_offload and self._device.type != "cpu"
        reshard = self._config.reshard_after_forward
        options = {
            # The ranks' gradients are added up in float32, whatever the dtype of the weights.
            "mp_policy": MixedPrecisionPolicy(
                reduce_dtype=torch.promote_types(model.dtype, torch.float32), cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy() if offloaded else OffloadPolicy(),
        }
        require_experts(self.mesh.expert, experts=max(map(experts_of, stacked_experts(model).values()), default=1))
        experts = self._expert_cut(model)
        for layer in decoder_layers(model):
            if experts is not None and (held := experts.apply(layer)) is not None:
                fully_shard(held, mesh=self._meshes.of_experts, reshard_after_forward=reshard, **options)
            fully_shard(layer, mesh=self._meshes.sharded, reshard_after_forward=reshard, **options)
        # A backward pass begins with the parameters outside the layers, above all the head: if freed after the forward
        # pass, they would be gathered again at once.
        fully_shard(model, mesh=self._meshes.sharded, reshard_after_forward=False, **options)
        modules = _sharded_modules(model)
        self._replicated += modules if self._meshes.sharded.ndim > 1 else []
        for module in modules:
            # The loss is normalized by counts over all ranks: their gradients add up, where FSDP takes the mean.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        setattr(model, FORWARD_METHOD, MethodType(_call, model))
        register_fsdp_forward_method(model, FORWARD_METHOD)
        setattr(model, FORWARD_METHOD, _Resharding(model, getattr(model, FORWARD_METHOD)))

    def _expert_cut(self, model: PreTrainedModel) -> ExpertCut | None:
        mesh = self._meshes.expert
        return None if mesh is None else ExpertCut(model, mesh=mesh, group=rank_group(ExpertGroup, mesh))

    def begin_pass(self, *, last: bool) -> None:
        # The sums of a batch's passes within a replica travel to the other replicas once.
        for module in self._replicated:
            module.set_requires_all_reduce(last, recurse=False)

    def sum_squares(self, own: float) -> float:
        squares = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(squares, group=self._meshes.sharded.get_group(_SHARD))
        return squares.item()

    def whole(self, tensor: Tensor) -> Tensor:
        return next(self.gather([tensor]))

    def gather(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield whole tensors as :meth:`Strategy.gather`.

        While one buffer's tensors are used, the next buffer travels.
        """
        cut = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        buckets = by_size(cut, elements=self._buffer_elements, kind=_kind)
        arrived = (tensor for finish in _ahead(map(self._begin, buckets)) for tensor in finish())
        return (next(arrived) if isinstance(tensor, DTensor) else tensor for tensor in tensors)

    def gather_to(self, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> Iterator[Tensor]:
        """Yield whole tensors as :meth:`Strategy.gather_to`: one collective per part and dtype, to a single rank.

        In a group of replicas only the one with that rank takes part.
        """
        for finish in _ahead(self._begin_part(tensors, to=rank) for rank, tensors in parts):
            yield from finish()

    def _begin_part(self, tensors: Sequence[Tensor], *, to: int) -> Callable[[], Iterator[Tensor]]:
        cut = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        begun = [
            self._begin(bucket, to=to) for bucket in by_size(cut, elements=sum(t.numel() for t in cut), kind=_kind)
        ]

        def finish() -> Iterator[Tensor]:
            arrived = (tensor for end in begun for tensor in end())
            if to == self.rank:
                yield from (next(arrived) if isinstance(tensor, DTensor) else tensor for tensor in tensors)
            yield from arrived  # empty on other ranks, where this only waits for their sends

        return finish

    @torch.no_grad()
    def _begin(self, bucket: Sequence[DTensor], *, to: int | None = None) -> Callable[[], Iterator[Tensor]]:
        """Request other ranks' parts of some tensors of one dtype; the result waits for them.

        With ``to`` it yields nothing on other ranks.

        Of FSDP's tensor (or a rank's experts) rank r of n has the rows [r * k, (r + 1) * k) of [rows, ...], where k =
        ceil(rows / n); the last ranks may have fewer, or none.
        """
        ways = self.mesh.expert if is_dealt_out(bucket[0]) else 1
        shapes = [torch.Size((tensor.shape[0] // ways, *tensor.shape[1:])) for tensor in bucket]
        ranks = self.mesh.cut // ways
        sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
        own = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=self._device)
        for room, tensor in zip(own.split(sizes), bucket, strict=True):
            local = tensor.to_local().reshape(-1)
            room[: local.numel()].copy_(local)
        group = self._meshes.sharded.get_group(_SHARD)
        if to is not None and to not in dist.get_process_group_ranks(group):
            return lambda: iter(())
        buffer = own.new_empty(ranks * ways * own.numel() if to in (None, self.rank) else 0)
        if to is None:
            work = _all_gather(buffer, own, group=group, async_op=True)
        else:
            work = _gather_at(to, buffer, own, group=group)

        def finish() -> Iterator[Tensor]:
            work.wait()
            if not buffer.numel():
                return
            arrived = buffer.view(ranks, ways, -1).split(sizes, dim=2)
            for rows, shape in zip(arrived, shapes, strict=True):
                parts = [rows[:, way].flatten()[: shape.numel()].view(shape) for way in range(ways)]
                yield parts[0] if ways == 1 else torch.cat(parts)

        return finish

    def shares(self, tensors: Mapping[str, Tensor]) -> dict[str, Share]:
        found: dict[str, Share] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                found |= super().shares({name: tensor}) if self.rank == 0 else {}
            elif _is_first_replica(tensor):
                _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                found[name] = Share(tensor.to_local().detach(), tuple(tensor.shape), offset[0])
        return found

    @torch.no_grad()
    def spread(self, like: Tensor, whole: Tensor) -> Tensor:
        own = super().spread(like, whole)
        if not isinstance(like, DTensor):
            return own
        shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
        places = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        return sharded_as(like, own[places].to(like.device, copy=True))


@dataclass(frozen=True, slots=True)
class _Meshes:
    """Meshes of the same ranks.

    Attributes:
        sharded: over whose last dimension FSDP shards the model; all tensors are gathered over it.
        of_experts: over which FSDP shards a rank's experts, where they are dealt out.
        expert: this rank and those that experts are dealt out to.
    """

    sharded: DeviceMesh
    of_experts: DeviceMesh | None = None
    expert: DeviceMesh | None = None


def _meshes(device_type: str, mesh: Mesh) -> _Meshes:
    replicas = mesh.ranks // mesh.cut
    sharded = _named(device_type, {"replicate": replicas, _SHARD: mesh.cut})
    if mesh.expert == 1:
        return _Meshes(sharded)
    nested = _named(device_type, {"replicate": replicas, _SHARD: mesh.cut // mesh.expert, EXPERT: mesh.expert})
    return _Meshes(sharded, nested[_SHARD] if replicas == 1 else nested["replicate", _SHARD], nested[EXPERT])


def _named(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh of these dimensions, without the replica dimension if there is only one."""
    kept = {name: size for name, size in sizes.items() if name != "replicate" or size > 1}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _is_first_replica(tensor: DTensor) -> bool:
    """Return True if this rank is the first of those that have the same part of a tensor."""
    places = tensor.device_mesh.get_coordinate() or ()
    return not any(place for place, held in zip(places, tensor.placements, strict=True) if held.is_replicate())


def _kind(tensor: DTensor) -> object:
    """Return the key that tensors gathered together have in common."""
    return tensor.dtype, is_dealt_out(tensor)


def _gather_at(rank: int, buffer: Tensor, own: Tensor, *, group: dist.ProcessGroup) -> Any:
    """Begin to gather a group's parts into one rank's buffer, which is empty on other ranks."""
    parts = [*buffer.view(group.size(), -1)] if buffer.numel() else None
    return dist.gather(own, parts, dst=rank, group=group, async_op=True)


def _ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, and make each one before its predecessor is used."""
    stream = iter(items)
    held = next(stream, None)
    while held is not None:
        following = next(stream, None)
        yield held
        held = following


def _call(self: torch.nn.Module, function: Callable[[], T]) -> T:
    return function()


class _Resharding:
    """Hook that reshards after a pass without gradients.

    Otherwise the gathered parameters would stay and become stale after a step.
    """

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
