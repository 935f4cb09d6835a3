"""Strategies for a model on one device or many: placement, sharding and reductions. No RL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter
from transformers import PreTrainedModel

from lachesis.common.runs import runs
from lachesis.config.schema import DistributedConfig
from lachesis.config.schema.mesh import Mesh, derive_mesh
from lachesis.train.model.compilation import compiler_arguments
from lachesis.train.model.context import ContextGroup
from lachesis.train.model.rank_group import RankGroup
from lachesis.transport.digest import Share

# Tensors travel in buffers of about this many elements: one collective for many small ones.
BUFFER_ELEMENTS = 2**25
T = TypeVar("T")
TensorT = TypeVar("TensorT", bound=Tensor)
GroupT = TypeVar("GroupT", bound=RankGroup)
# The method that a strategy adds to a model whose parameters are whole only during its forward.
FORWARD_METHOD = "run_within"


class Strategy:
    """Placement of a model on one device or many; the methods here serve a single process.

    Ranks call the methods together and in the same order, except those marked as local.

    Attributes:
        mesh: how the ranks are laid out.
        context: the ranks that share this rank's tokens of a micro-batch, itself included; None without others.
        sharded: True if parameters are cut over ranks, so that no rank has one whole.
    """

    rank: int
    world_size: int
    mesh: Mesh
    context: ContextGroup | None
    sharded: bool

    @property
    def together(self) -> bool:
        """Return True if a pass through the model involves other ranks."""
        return self.sharded or self.context is not None

    def place(self, model: PreTrainedModel) -> None:
        """Move the model to its training device, sharded in place if need be; before anything runs it."""

    def device(self, model: PreTrainedModel) -> torch.device:
        """Return the device on which the model computes; offloaded parameters are elsewhere.

        Local to this process.
        """
        return next(model.parameters()).device

    def compile(self, model: PreTrainedModel) -> None:
        """Compile the decoder layers in place. Local to this process."""
        for layer in decoder_layers(model):
            layer.compile(**compiler_arguments())

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        """Return integer counts summed over all parts of a batch; ranks that share a part count once."""
        return counts

    def sum_values(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor of equal shape over all ranks."""
        return values

    def sum_squares(self, own: float) -> float:
        """Return the sum of squares over all shards, from that of this rank's."""
        return own

    def max_count(self, count: int) -> int:
        """Return the largest of a count over all ranks: the number of joint calls that each must take part in."""
        return count

    def gather_values(self, values: Tensor) -> Tensor:
        """Return the values [n] of all parts of a batch, concatenated; ranks that share a part give it once."""
        return values

    def begin_pass(self, *, last: bool) -> None:
        """Begin a forward and backward pass, which may be the ``last`` of a batch.

        Local to this process.
        """

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Sum each ``.grad`` over all ranks, unless the backward pass has done so."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor of the model (itself if it is not sharded).

        Only rank 0 may use the result.
        """
        return tensor

    def gather(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield :meth:`whole` of each tensor, in order, on demand; several small ones travel together.

        Other ranks must take all of them too.
        """
        return (self.whole(tensor) for tensor in tensors)

    def gather_to(self, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> Iterator[Tensor]:
        """Yield :meth:`whole` of the tensors of each part, in order, only on the rank that is named with it.

        While one part is used, the next one travels. All ranks must consume everything they get.
        """
        return (tensor for rank, tensors in parts if rank == self.rank for tensor in tensors)

    def shares(self, tensors: Mapping[str, Tensor]) -> dict[str, Share]:
        """Return this rank's parts of tensors; one rank gives a part that several have. Local to this process."""
        return {name: Share(tensor.detach(), tuple(tensor.shape)) for name, tensor in tensors.items()}

    def spread(self, like: Tensor, whole: Tensor) -> Tensor:
        """Return the part of ``whole`` that this rank copies into ``like``: the inverse of :meth:`whole`.

        Ranks other than 0 may give a tensor of the same shape and dtype on the meta device.
        """
        return whole


class SingleDevice(Strategy):
    """Strategy of one process with one GPU, or none."""

    rank = 0
    world_size = 1
    mesh = Mesh()
    context = None
    sharded = False


class Ranks(Strategy):
    """Base of strategies over several ranks: collectives over the group of all ranks, which must exist.

    Args:
        device: of this rank.
        config: source of the mesh.
    """

    def __init__(self, device: torch.device, config: DistributedConfig) -> None:
        self._device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.mesh = derive_mesh(config, ranks=self.world_size)
        shape, names = (self.mesh.parts, self.mesh.context), ("part", "context")
        layout = init_device_mesh(device.type, shape, mesh_dim_names=names) if self.mesh.context > 1 else None
        self.context = None if layout is None else rank_group(ContextGroup, layout["context"])

    def device(self, model: PreTrainedModel) -> torch.device:
        return self._device

    def compile(self, model: PreTrainedModel) -> None:
        for layer in decoder_layers(model):
            # Only the forward, because the hooks around it gather parameters and must stay outside the graph.
            layer.forward = torch.compile(layer.forward, **compiler_arguments())

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        total = torch.tensor(counts, dtype=torch.int64, device=self._device)
        dist.all_reduce(total)
        return tuple(count // self.mesh.context for count in total.tolist())

    def sum_values(self, values: Tensor) -> Tensor:
        total = values.to(self._device, copy=True)
        dist.all_reduce(total)
        return total

    def max_count(self, count: int) -> int:
        largest = torch.tensor([count], dtype=torch.int64, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())

    def gather_values(self, values: Tensor) -> Tensor:
        count = torch.tensor([values.numel()], dtype=torch.int64, device=self._device)
        counts = [torch.empty_like(count) for _ in range(self.world_size)]
        dist.all_gather(counts, count)
        lengths = [int(count.item()) for count in counts]
        padded = values.new_zeros(max(lengths))
        padded[: values.numel()] = values
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        own = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        return torch.cat(self.mesh.of_parts(own))

    @torch.no_grad()
    def spread(self, like: Tensor, whole: Tensor) -> Tensor:
        own = whole.to(self._device) if self.rank == 0 else torch.empty_like(whole, device=self._device)
        dist.broadcast(own, src=0)
        return own


class Replicate(Ranks):
    """Strategy with the whole model on every rank; gradients are summed before each step (data parallelism).

    Replicas begin with rank 0's weights, and equal gradients keep them equal.
    """

    sharded = False

    @torch.no_grad()
    def place(self, model: PreTrainedModel) -> None:
        model.to(self._device)  # type: ignore[arg-type]
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        sum_in_place([p.grad for p in parameters if p.grad is not None], device=self._device)


def rank_group(kind: type[GroupT], mesh: DeviceMesh) -> GroupT:
    """Return this rank's group in a mesh of one dimension."""
    return kind(rank=mesh.get_local_rank(), size=mesh.size(), group=mesh.get_group())


@torch.no_grad()
def sum_in_place(tensors: Sequence[Tensor], *, device: torch.device) -> None:
    """Sum tensors over all ranks; several small ones travel together."""
    for bucket in by_size(tensors, elements=BUFFER_ELEMENTS):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
        # 16-bit sums would lose what a rank adds.
        total = flat.to(torch.promote_types(flat.dtype, torch.float32))
        dist.all_reduce(total)
        parts = total.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def by_size(
    tensors: Sequence[TensorT], *, elements: int, kind: Callable[[TensorT], object] = lambda tensor: tensor.dtype
) -> Iterator[list[TensorT]]:
    """Yield runs of one kind, of at most ``elements`` elements or a single tensor."""
    for _, alike in groupby(tensors, key=kind):
        yield from runs(alike, size=lambda tensor: tensor.numel(), limit=elements)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks of a language model: the members of its longest outer module list."""
    return list(decoder_list(model))


def decoder_list(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list that holds a language model's repeated blocks; an empty one of a model without such a list."""
    lists = [module for module in text_part(model).modules() if isinstance(module, nn.ModuleList)]
    # A block's own lists, of experts or of a norm for each head, may be longer than the list of blocks.
    inner = {id(module) for outer in lists for module in outer.modules() if module is not outer}
    return max((one for one in lists if id(one) not in inner), key=len, default=nn.ModuleList())


def text_part(model: PreTrainedModel) -> nn.Module:
    """Return the language model without its head in a model for images and text; another model itself."""
    config: Any = getattr(model, "config", None)
    if config is None or config.get_text_config() is config:
        return model
    return model.get_decoder()


def run_within(model: nn.Module, function: Callable[[], T]) -> T:
    """Call ``function`` while the model's outer parameters (embeddings, head) are whole, as in its forward.

    Without sharding it only calls the function. A backward pass begins from the returned tensors.
    """
    run = getattr(model, FORWARD_METHOD, None)
    return function() if run is None else run(function)
