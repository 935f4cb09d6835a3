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
    """A mesh of ranks ``replicate x shard x context``, numbered so that the last dimension varies fastest.

    Attributes:
        replicate: number of groups of ranks that each hold the whole model; gradients are summed over them.
        shard: number of parts of a batch that a group computes at a time; parameters are sharded over them (FSDP).
        context: number of ranks that share the tokens of a micro-batch. Parameters are sharded over these too.
        expert: number of ranks that share the experts of each layer and send tokens to each other. It is not a separate
            dimension: these are ranks of ``context`` and ``shard``, from the fastest-varying dimension on.
        whole: True if no parameter is sharded: each rank has the whole model (DDP).
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    whole: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.parts * self.context

    @property
    def parts(self) -> int:
        """Return the number of data-parallel parts that a batch is divided into."""
        return self.replicate * self.shard

    @property
    def cut(self) -> int:
        """Return the number of shards of each parameter, its gradient and its optimizer states."""
        return 1 if self.whole else self.shard * self.context

    @property
    def words(self) -> str:
        """Describe the dimensions; return an empty text for plain data parallelism."""
        sizes = {"replicate": self.replicate, "shard": self.shard, "context": self.context}
        dimensions = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        said = len(dimensions) > 1 or self.context > 1 or self.expert > 1
        return " x ".join(dimensions) * said + f", experts over {self.expert}" * (self.expert > 1)

    def of_ranks(self, parts: Sequence[T]) -> list[T]:
        """Return a value for each rank, given one for each part of a batch."""
        return [part for part in parts for _ in range(self.context)]

    def of_parts(self, values: Sequence[T]) -> list[T]:
        """Return a value for each part of a batch, that of its first rank; the inverse of :meth:`of_ranks`."""
        return list(values[:: self.context])


def derive_mesh(distributed: DistributedConfig, *, ranks: int) -> Mesh:
    """Return the mesh of ``ranks`` ranks; sizes are ignored for a single rank.

    Raises:
        ConfigError: the configured sizes do not divide the number of ranks, or contradict each other.
    """
    context, expert = distributed.context_parallel_size, distributed.expert_parallel_size
    if ranks % context:
        raise ConfigError(
            f"distributed.context_parallel_size is {context} but {ranks} device(s) train, which is not a multiple",
            remedy=f"leave it out, or have a multiple of {context} train (plan: --devices {context}): {HOW_TO_START}",
        )
    if ranks == 1 and expert == 1:
        return Mesh()
    parts, whole = ranks // context, distributed.strategy == "replicate"
    there_are = f"there are {parts} " + (f"groups of {context} that share a micro-batch" if context > 1 else "devices")
    if whole and expert > 1:
        raise ConfigError(
            f"distributed.expert_parallel_size is {expert}, but distributed.strategy replicate shards nothing",
            remedy="leave distributed.strategy out; use distributed.shard_size: 1 to shard only the experts",
        )
    if whole and (distributed.shard_size or 1) > 1:
        raise ConfigError(
            f"distributed.shard_size is {distributed.shard_size}, but distributed.strategy replicate shards nothing",
            remedy="leave one of the two out",
        )
    shard, replicate = 1 if whole else distributed.shard_size, distributed.replicate_size
    for key, size in (("shard_size", shard), ("replicate_size", replicate)):
        if size is not None and parts % size:
            raise ConfigError(
                f"distributed.{key} is {size}, but {there_are}, which is not a multiple",
                remedy=f"choose a divisor of {parts}, or leave it out",
            )
    shard = shard or parts // (replicate or 1)
    replicate = replicate or parts // shard
    if replicate * shard != parts:
        raise ConfigError(
            f"distributed.replicate_size is {replicate}, for groups of {shard}, but {there_are}",
            remedy="leave replicate_size or shard_size out: it follows from the other and the number of devices",
        )
    if shard * context % expert:
        raise ConfigError(
            f"distributed.expert_parallel_size is {expert}, which does not divide the {shard * context} devices that "
            "share one copy of the model",
            remedy=f"choose a divisor of {shard * context}",
        )
    return Mesh(replicate=replicate, shard=shard, context=context, expert=expert, whole=whole)


def require_heads(context: int, *, heads: int, kv_heads: int) -> None:
    """Raise if the attention heads cannot be divided among ``context`` ranks.

    Raises:
        ConfigError: they cannot.
    """
    if heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0):
        return
    raise ConfigError(
        f"distributed.context_parallel_size is {context}, but the model has {heads} attention heads and {kv_heads} "
        "key-value heads: each device needs a whole number of both",
        remedy=f"choose a divisor of {math.gcd(heads, kv_heads)}, or leave it out",
    )


def require_experts(ranks: int, *, experts: int) -> None:
    """Raise if the experts of a layer (1 for a dense model) cannot be divided among ``ranks``.

    Raises:
        ConfigError: they cannot.
    """
    if ranks > 1 and (experts == 1 or experts % ranks):
        has = f"the model has {experts} experts in a layer" if experts > 1 else "the model is not a mixture of experts"
        raise ConfigError(
            f"distributed.expert_parallel_size is {ranks}, but {has}: each device needs a whole number",
            remedy=f"choose a divisor of {experts}, or leave it out" if experts > 1 else "leave it out",
        )
