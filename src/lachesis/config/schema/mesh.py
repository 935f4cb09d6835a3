"""The layout of a run's ranks: one mesh of named dimensions, derived from configuration and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from lachesis.common.errors import ConfigError
from lachesis.common.world import HOW_TO_START
from lachesis.config.schema import DistributedConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks ``replicate x shard x context x tensor``, numbered so that the last dimension varies fastest.

    Attributes:
        replicate: groups of ranks that have the whole model each; gradients are added up over them.
        shard: parts of a batch that such a group computes at a time, over which each parameter is cut (FSDP).
        context: ranks that share the tokens of a micro-batch. Parameters are cut over these too.
        tensor: ranks that share the matrices of each layer, and compute all tokens with their parts of them.
        expert: ranks that share the experts of each layer, and send them their tokens. They are no dimension of their
            own: these ranks are those of ``tensor``, ``context`` and ``shard``, from the fastest on.
        whole: whether no parameter is cut after all: each rank has the model (DDP).
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    whole: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.parts * self.alike

    @property
    def parts(self) -> int:
        """Return the number of data-parallel parts that a batch is divided into."""
        return self.replicate * self.shard

    @property
    def alike(self) -> int:
        """Return the number of ranks that have the same part of a batch and compute it together."""
        return self.context * self.tensor

    @property
    def cut(self) -> int:
        """Return how many ways each parameter, its gradient and its optimizer states are cut, ``tensor`` aside."""
        return 1 if self.whole else self.shard * self.context

    @property
    def words(self) -> str:
        """Return the dimensions in words; empty if plain data parallelism is the only one."""
        sizes = {"replicate": self.replicate, "shard": self.shard, "context": self.context, "tensor": self.tensor}
        dimensions = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        said = len(dimensions) > 1 or self.alike > 1 or self.expert > 1
        return " x ".join(dimensions) * said + f", experts over {self.expert}" * (self.expert > 1)

    def of_ranks(self, parts: Sequence[T]) -> list[T]:
        """Return the part of each rank, given one for each part of a batch."""
        return [part for part in parts for _ in range(self.alike)]

    def of_parts(self, values: Sequence[T]) -> list[T]:
        """Return one value for each part of a batch, that of its first rank: the reverse of :meth:`of_ranks`."""
        return list(values[:: self.alike])


def derive_mesh(distributed: DistributedConfig, *, ranks: int) -> Mesh:
    """Return the mesh of ``ranks`` ranks; a single rank has no groups to shard over, whatever sizes are set.

    Raises:
        ConfigError: the configured sizes do not divide the ranks, or do not go together.
    """
    context, tensor = distributed.context_parallel_size, distributed.tensor_parallel_size
    alike = context * tensor
    if ranks % alike:
        sizes = {"context_parallel_size": context, "tensor_parallel_size": tensor}
        named = " and ".join(f"distributed.{key} is {size}" for key, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{named} and {ranks} device(s) train: they do not make whole groups",
            remedy=f"leave it out, or have a multiple of {alike} train (plan: --devices {alike}): {HOW_TO_START}",
        )
    if ranks == 1 and distributed.expert_parallel_size == 1:
        return Mesh()
    parts, whole = ranks // alike, distributed.strategy == "replicate"
    there_are = f"there are {parts} " + (f"groups of {alike} that share a micro-batch" if alike > 1 else "devices")
    expert = distributed.expert_parallel_size
    for key, size in (("tensor_parallel_size", tensor), ("expert_parallel_size", expert)):
        if whole and size > 1:
            raise ConfigError(
                f"distributed.{key} is {size}, and distributed.strategy replicate cuts nothing",
                remedy="leave distributed.strategy out; distributed.shard_size: 1 cuts no more than that",
            )
    if whole and (distributed.shard_size or 1) > 1:
        raise ConfigError(
            f"distributed.shard_size is {distributed.shard_size}, and distributed.strategy replicate cuts nothing",
            remedy="leave one of the two out",
        )
    shard, replicate = 1 if whole else distributed.shard_size, distributed.replicate_size
    for key, size in (("shard_size", shard), ("replicate_size", replicate)):
        if size is not None and parts % size:
            raise ConfigError(
                f"distributed.{key} is {size} and {there_are}: they do not make whole groups",
                remedy=f"choose a divisor of {parts}, or leave it out",
            )
    shard = shard or parts // (replicate or 1)
    replicate = replicate or parts // shard
    if replicate * shard != parts:
        raise ConfigError(
            f"distributed.replicate_size is {replicate}, of groups of {shard}, and {there_are}",
            remedy="leave replicate_size or shard_size out: it follows from the other and the number of devices",
        )
    if expert > 1 and (shard * alike % expert or expert % tensor):
        raise ConfigError(
            f"distributed.expert_parallel_size is {expert}, of groups of {shard * alike} devices that have the model "
            f"once, of which {tensor} share matrices: they do not make whole groups",
            remedy=f"choose a divisor of {shard * alike}" + f" and a multiple of {tensor}" * (tensor > 1),
        )
    return Mesh(replicate=replicate, shard=shard, context=context, tensor=tensor, expert=expert, whole=whole)


def require_heads(mesh: Mesh, *, heads: int, kv_heads: int) -> None:
    """Raise if the attention heads cannot be divided among the ranks of a mesh.

    Raises:
        ConfigError: they cannot.
    """
    tensor, context = mesh.tensor, mesh.context
    of_model = f"the model has {heads} attention heads, {kv_heads} of keys and values"
    if heads % tensor or kv_heads % tensor:
        raise ConfigError(
            f"distributed.tensor_parallel_size is {tensor}, and {of_model}: each device needs a whole number",
            remedy=f"choose a divisor of {math.gcd(heads, kv_heads)}, or leave it out",
        )
    heads, kv_heads = heads // tensor, kv_heads // tensor
    if heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0):
        return
    left = f", of which each group of {context} has {heads} and {kv_heads}" if tensor > 1 else ""
    raise ConfigError(
        f"distributed.context_parallel_size is {context}, and {of_model}{left}: each device needs a whole number",
        remedy=f"choose a divisor of {math.gcd(heads, kv_heads)}, or leave it out",
    )


def require_experts(mesh: Mesh, *, experts: int) -> None:
    """Raise if the experts of a layer (1 for a dense model) cannot be divided among the ranks of a mesh.

    Raises:
        ConfigError: they cannot, or ranks that share matrices would each compute all of them.
    """
    if mesh.expert > 1 and (experts == 1 or experts % mesh.expert):
        has = f"the model has {experts} in a layer" if experts > 1 else "the model is not a mixture of experts"
        raise ConfigError(
            f"distributed.expert_parallel_size is {mesh.expert}, and {has}: each device needs a whole number",
            remedy=f"choose a divisor of {experts}, or leave it out" if experts > 1 else "leave it out",
        )
    if mesh.tensor > 1 and mesh.expert == 1 and experts > 1:
        raise ConfigError(
            f"distributed.tensor_parallel_size is {mesh.tensor}, and each of these devices would compute all {experts} "
            "experts of a layer",
            remedy=f"set distributed.expert_parallel_size to {mesh.tensor} or a multiple of it",
        )
