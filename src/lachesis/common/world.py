"""The place of this process among those that torchrun started. Imports no torch, because every command asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.common.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# Prefixes of all variables that torchrun sets for its workers.
_OF_TORCHRUN = (*VARIABLES, "GROUP_WORLD_SIZE", "ROLE_", "TORCHELASTIC_")
HOW_TO_START = "torchrun --nproc-per-node N -m lachesis train CONFIG.yaml"


@dataclass(frozen=True, slots=True)
class World:
    """Ranks of a job: ``size`` on all nodes, ``local_size`` of them here; this process is ``rank``, on ``local_rank``.

    ``restarts`` counts how often torchrun has restarted all of them; ``one_machine`` is true if a launcher says that
    all ranks are here.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int = 0
    one_machine: bool = False


def world_size(environment: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun or accelerate started, including this one.

    Raises:
        ConfigError: WORLD_SIZE is not a number of processes.
    """
    text = environment.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"WORLD_SIZE is {text!r}, which is not a number of processes",
            remedy=f"unset it, or start several devices with {HOW_TO_START}",
        )
    return int(text)


def find_world(environment: Mapping[str, str]) -> World | None:
    """Return this process's place among the ranks of torchrun; None if it is alone.

    Raises:
        ConfigError: some of the variables are missing, or are not numbers that belong together.
    """
    size = world_size(environment)
    if size <= 1:
        return None
    try:
        rank = int(environment["RANK"])
        world = World(
            rank=rank,
            size=size,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            one_machine="TORCHELASTIC_RUN_ID" in environment and environment.get("LOCAL_WORLD_SIZE") == str(size),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but others of torchrun's variables are wrong: {error}",
            remedy=f"start several devices with {HOW_TO_START}, or unset WORLD_SIZE",
        ) from error
    if not 0 <= world.rank < world.size or not 0 <= world.local_rank < world.local_size <= world.size:
        raise ConfigError(
            f"rank {world.rank} of {world.size} (local rank {world.local_rank} of {world.local_size}) is impossible",
            remedy=f"start several devices with {HOW_TO_START}",
        )
    return world


def launchers_variables(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names of variables that a launcher set for its ranks, for removal from a rank's child processes.

    With TORCHELASTIC_USE_AGENT_STORE a child would take torchrun's store for its own, and wait there forever.
    """
    return frozenset(name for name in environment if name.startswith(_OF_TORCHRUN))
