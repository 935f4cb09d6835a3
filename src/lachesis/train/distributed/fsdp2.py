"""Sharding of the model over ranks by PyTorch's FSDP2: each has a part of every parameter and of its states.

A decoder layer's parameters are gathered when it runs and, if requested, released until its backward pass; everything
outside the layers (embeddings, last norm, head; tied ones as one) stays gathered from a pass's forward to its backward.
The policy reads the head's weight itself, so the whole pass runs as the model's forward
(:func:`~lachesis.train.distributed.strategy.run_within`). If ranks share the matrices of a layer, FSDP shards each
rank's part of them.
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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter
from transformers import PreTrainedModel

from lachesis.config.schema import DistributedConfig
from lachesis.config.schema.mesh import Mesh, require_experts
from lachesis.engines.embedded.experts import stacked_experts
from lachesis.train.distributed.cut import EXPERT, TENSOR, cut_by
from lachesis.train.distributed.expert_parallel import ExpertCut
from lachesis.train.distributed.sharded_checkpoint import sharded_as
from lachesis.train.distributed.strategy import (
    BUFFER_ELEMENTS,
    FORWARD_METHOD,
    Ranks,
    T,
    by_size,
    decoder_layers,
    rank_group,
    sum_in_place,
)
from lachesis.train.distributed.tensor_parallel import TensorCut
from lachesis.train.model.dispatch import ExpertGroup
from lachesis.train.model.experts import experts_of
from lachesis.transport.digest import Share

# The dimension of the mesh over which tensors are cut.
_SHARD = "shard"
# As torch calls it since 2.13, or before.
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
        self._experts = rank_group(ExpertGroup, self._meshes.expert, EXPERT)
        self._cuts: list[TensorCut] = []
        self._replicated: list[FSDPModule] = []

    def place(self, model: PreTrainedModel) -> None:
        offloaded = self._config.cpu_offload and self._device.type != "cpu"
        reshard = self._config.reshard_after_forward
        options = {
            # Whatever the weights are in, ranks' gradients are added up in float32.
            "mp_policy": MixedPrecisionPolicy(
                reduce_dtype=torch.promote_types(model.dtype, torch.float32), cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy() if offloaded else OffloadPolicy(),
        }
        require_experts(self.mesh, experts=max(map(experts_of, stacked_experts(model).values()), default=1))
        tensors, experts = self._tensor_cut(model), self._expert_cut(model)
        for layer in decoder_layers(model):
            if tensors is not None:
                tensors.apply(layer)
            if experts is not None and (held := experts.apply(layer)) is not None:
                fully_shard(held, mesh=self._meshes.of_experts, reshard_after_forward=reshard, **options)
            fully_shard(layer, mesh=self._meshes.sharded, reshard_after_forward=reshard, **options)
        # What is outside of the layers, the head above all, is what a backward pass begins with: let go of after the
        # forward pass it would be gathered a second time at once.
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

    def _tensor_cut(self, model: PreTrainedModel) -> TensorCut | None:
        if self.tensor is None:
            return None
        assert self._meshes.tensor is not None
        self._cuts.append(TensorCut(model, mesh=self._meshes.tensor, group=self.tensor))
        return self._cuts[-1]

    def _expert_cut(self, model: PreTrainedModel) -> ExpertCut | None:
        if self._experts is None:
            return None
        assert self._meshes.expert is not None
        return ExpertCut(model, mesh=self._meshes.expert, group=self._experts, tensor=self.tensor)

    def begin_pass(self, *, last: bool) -> None:
        # What the passes of a batch have added up within a replica travels to the others once.
        for module in self._replicated:
            module.set_requires_all_reduce(last, recurse=False)

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Sum the gradients of parameters that are equal in a tensor group; FSDP has summed all others."""
        if self.tensor is None:
            return
        partial = {number for cut in self._cuts for number in cut.partial}
        gradients: list[Tensor] = []
        for parameter in parameters:
            if isinstance(parameter.grad, DTensor) and cut_by(parameter) is None:
                gradient = parameter.grad.to_local()
                gradients.append(gradient if id(parameter) in partial else gradient.div_(self.tensor.size))
        sum_in_place(gradients, device=self._device, group=self.tensor.group)

    def sum_squares(self, alike: float, cut: float) -> float:
        squares = torch.tensor([alike, cut], dtype=torch.float64, device=self._device)
        dist.all_reduce(squares[:1], group=self._meshes.sharded.get_group(_SHARD))
        dist.all_reduce(squares[1:], group=self._meshes.cut.get_group(_SHARD))
        return squares.sum().item()

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
            yield from arrived  # none: where they are for another rank this waits for what was sent

        return finish

    @torch.no_grad()
    def _begin(self, bucket: Sequence[DTensor], *, to: int | None = None) -> Callable[[], Iterator[Tensor]]:
        """Request other ranks' parts of some tensors of one dtype; the result waits for them.

        With ``to`` it yields nothing on other ranks.

        Of FSDP's tensor (or part) rank r of n has the rows [r * k, (r + 1) * k) of [rows, ...], where k = ceil(rows /
        n); the last ranks may have fewer, or none.
        """
        ways = {None: 1, TENSOR: self.mesh.tensor, EXPERT: self.mesh.expert}[cut_by(bucket[0])]
        mesh = self._meshes.sharded if ways == 1 else self._meshes.cut
        shapes = [_part_shape(tensor, ways) for tensor in bucket]
        ranks = mesh.size(-1) // ways
        sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
        own = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=self._device)
        for room, tensor in zip(own.split(sizes), bucket, strict=True):
            local = tensor.to_local().reshape(-1)
            room[: local.numel()].copy_(local)
        group = mesh.get_group(_SHARD)
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
            for rows, shape, tensor in zip(arrived, shapes, bucket, strict=True):
                parts = [rows[:, way].flatten()[: shape.numel()].view(shape) for way in range(ways)]
                yield parts[0] if ways == 1 else torch.cat(parts, dim=_cut_dimension(tensor))

        return finish

    def shares(self, tensors: Mapping[str, Tensor]) -> dict[str, Share]:
        found: dict[str, Share] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                found |= super().shares({name: tensor}) if self.rank == 0 else {}
            elif self._says(tensor):
                _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                column = offset[-1] if tensor.ndim > 1 else 0
                found[name] = Share(tensor.to_local().detach(), tuple(tensor.shape), offset[0], column)
        return found

    def _says(self, tensor: DTensor) -> bool:
        """Return True if this rank is the first of those that have the same part of a tensor."""
        places = tensor.device_mesh.get_coordinate() or ()
        replica = any(place for place, held in zip(places, tensor.placements, strict=True) if held.is_replicate())
        alike = self.tensor is not None and self.tensor.rank > 0 and cut_by(tensor) is None
        return not replica and not alike

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
    """Meshes of the same ranks, as seen by FSDP, by holders of pre-cut parameters, and by groups.

    Tensors are gathered over the last dimension of ``sharded``, and of ``cut``.
    """

    sharded: DeviceMesh
    cut: DeviceMesh
    tensor: DeviceMesh | None = None
    of_experts: DeviceMesh | None = None
    expert: DeviceMesh | None = None


def _meshes(device_type: str, mesh: Mesh) -> _Meshes:
    replicas, of_model = mesh.parts * mesh.context // mesh.cut, mesh.cut * mesh.tensor
    flat = _named(device_type, {"replicate": replicas, _SHARD: of_model})
    sharded, tensor, of_experts, expert = flat, None, None, None
    if mesh.tensor > 1:
        sharded, tensor = _nested(device_type, replicas, of_model, TENSOR, mesh.tensor)
    if mesh.expert > 1:
        of_experts, expert = _nested(device_type, replicas, of_model, EXPERT, mesh.expert)
    return _Meshes(sharded=sharded, cut=flat, tensor=tensor, of_experts=of_experts, expert=expert)


def _nested(device_type: str, replicas: int, ranks: int, name: str, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh over which FSDP shards what groups cut, and the mesh of the groups.

    ``ranks`` hold the model once.
    """
    whole = _named(device_type, {"replicate": replicas, _SHARD: ranks // size, name: size})
    return (whole[_SHARD] if replicas == 1 else whole["replicate", _SHARD]), whole[name]


def _named(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh of these dimensions, without the replica dimension if there is only one."""
    kept = {name: size for name, size in sizes.items() if name != "replicate" or size > 1}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _cut_dimension(tensor: DTensor) -> int:
    """Return the dimension over which a tensor group has cut a tensor."""
    placement = tensor.placements[-1]
    assert isinstance(placement, Shard)
    return placement.dim


def _part_shape(tensor: DTensor, ways: int) -> torch.Size:
    """Return the shape of the part that FSDP cuts further by its rows."""
    shape = [*tensor.shape]
    if ways > 1:
        shape[_cut_dimension(tensor)] //= ways
    return torch.Size(shape)


def _kind(tensor: DTensor) -> object:
    """Return the key that tensors gathered together have in common."""
    return tensor.dtype, cut_by(tensor)


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
