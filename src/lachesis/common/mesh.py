"""How the ranks of a run are laid out: one mesh of named dimensions, derived from configuration and number of ranks."""

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
    """Ranks in a mesh ``replicate x shard x context``, numbered so that the last dimension turns fastest.

    Attributes:
        replicate: groups of ranks that have the whole model each; gradients are added up over them.
        shard: parts of a batch that such a group computes at a time, over which each parameter is cut (FSDP).
        context: ranks that share the tokens of a micro-batch. Parameters are cut over these too.
        whole: whether no parameter is cut after all: each rank has the model (DDP).
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    whole: bool = False

    @property
    def ranks(self) -> int:
        """All there are."""
        return self.replicate * self.shard * self.context

    @property
    def parts(self) -> int:
        """In so many a batch is divided: what data-parallel ranks compute at a time."""
        return self.replicate * self.shard

    @property
    def cut(self) -> int:
        """Ways in which each parameter, its gradient and its optimizer states are cut."""
        return 1 if self.whole else self.shard * self.context

    @property
    def words(self) -> str:
        """For a screen; empty where data-parallel ranks that are all alike are the only dimension."""
        sizes = {"replicate": self.replicate, "shard": self.shard, "context": self.context}
        dimensions = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(dimensions) if len(dimensions) > 1 or self.context > 1 else ""

    def of_ranks(self, parts: Sequence[T]) -> list[T]:
        """The part of each rank, of one for each part of a batch."""
        return [part for part in parts for _ in range(self.context)]

    def of_parts(self, values: Sequence[T]) -> list[T]:
        """The reverse: of what ranks of one part have alike, that of the first."""
        return list(values[:: self.context])


def derive_mesh(distributed: DistributedConfig, *, ranks: int) -> Mesh:
    """The mesh of so many ranks. One alone has no groups to shard over, whatever their sizes are to be.

    Raises:
        ConfigError: the sizes that are asked for do not divide the ranks, or do not go together.
    """
    context = distributed.context_parallel_size
    if ranks % context:
        raise ConfigError(
            f"distributed.context_parallel_size is {context} and {ranks} device(s) train: they make no whole groups",
            remedy=f"leave it out, or have a multiple of it train (plan: --devices {context}): {HOW_TO_START}",
        )
    if ranks == 1:
        return Mesh()
    parts, whole = ranks // context, distributed.strategy == "replicate"
    there_are = f"there are {parts} " + (f"groups of {context} that share a micro-batch" if context > 1 else "devices")
    if whole and (distributed.shard_size or 1) > 1:
        raise ConfigError(
            f"distributed.shard_size is {distributed.shard_size}, and distributed.strategy replicate cuts nothing",
            remedy="leave one of the two out",
        )
    shard, replicate = 1 if whole else distributed.shard_size, distributed.replicate_size
    for key, size in (("shard_size", shard), ("replicate_size", replicate)):
        if size is not None and parts % size:
            raise ConfigError(
                f"distributed.{key} is {size} and {there_are}: they make no whole groups",
                remedy=f"choose a divisor of {parts}, or leave it out",
            )
    shard = shard or parts // (replicate or 1)
    replicate = replicate or parts // shard
    if replicate * shard != parts:
        raise ConfigError(
            f"distributed.replicate_size is {replicate}, of groups of {shard}, and {there_are}",
            remedy="leave replicate_size or shard_size out: it is what the other leaves of the devices",
        )
    return Mesh(replicate=replicate, shard=shard, context=context, whole=whole)


def require_heads(context: int, *, heads: int, kv_heads: int) -> None:
    """See that attention's heads can be shared out among the ranks of a context.

    Raises:
        ConfigError: they cannot.
    """
    if heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0):
        return
    raise ConfigError(
        f"distributed.context_parallel_size is {context}, and the model has {heads} attention heads, {kv_heads} of "
        "keys and values: they are no whole number for each device",
        remedy=f"choose a divisor of {math.gcd(heads, kv_heads)}, or leave it out",
    )
