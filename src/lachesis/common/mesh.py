"""How the ranks of a run are laid out: one mesh of named dimensions, derived from configuration and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from lachesis.common.errors import ConfigError
from lachesis.config.schema import DistributedConfig


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a mesh ``replicate x shard``, numbered so that the last dimension turns fastest.

    Attributes:
        replicate: groups of ranks that have the whole model each; gradients are added up over them.
        shard: ranks of such a group, over which each parameter is cut (FSDP). With both above 1 it is HSDP.
    """

    replicate: int = 1
    shard: int = 1

    @property
    def ranks(self) -> int:
        """All there are."""
        return self.replicate * self.shard

    @property
    def cut(self) -> int:
        """Ways in which each parameter, its gradient and its optimizer states are cut."""
        return self.shard

    @property
    def words(self) -> str:
        """For a screen; empty where there is one group of ranks that are all alike."""
        return f"{self.replicate} replicas of {self.shard} shards" if min(self.replicate, self.shard) > 1 else ""


def derive_mesh(distributed: DistributedConfig, *, ranks: int) -> Mesh:
    """The mesh of so many ranks. One alone has no groups, whatever their sizes are to be.

    Raises:
        ConfigError: the sizes that are asked for do not divide the ranks, or do not go together.
    """
    if ranks == 1:
        return Mesh()
    shard, replicate = distributed.shard_size, distributed.replicate_size
    if distributed.strategy == "replicate":
        if (shard or 1) > 1:
            raise ConfigError(
                f"distributed.shard_size is {shard}, and with distributed.strategy replicate nothing is cut",
                remedy="leave one of the two out",
            )
        shard = 1
    _require_whole_groups(shard, "shard_size", ranks=ranks)
    _require_whole_groups(replicate, "replicate_size", ranks=ranks)
    shard = shard or ranks // (replicate or 1)
    replicate = replicate or ranks // shard
    if replicate * shard != ranks:
        raise ConfigError(
            f"distributed.replicate_size {replicate} and groups of {shard} are {replicate * shard} devices, and there "
            f"are {ranks}",
            remedy="leave replicate_size or shard_size out: it is what the other leaves of the devices",
        )
    return Mesh(replicate=replicate, shard=shard)


def _require_whole_groups(size: int | None, key: str, *, ranks: int) -> None:
    if size is not None and ranks % size:
        raise ConfigError(
            f"distributed.{key} is {size} and there are {ranks} devices: they make no whole groups",
            remedy=f"choose a divisor of {ranks}, or leave it out",
        )
