"""Who this process is among those that torchrun started. Imports no torch: every command asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.common.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# All that torchrun sets for its workers begins with one of these.
_OF_TORCHRUN = (*VARIABLES, "GROUP_WORLD_SIZE", "ROLE_", "TORCHELASTIC_")
HOW_TO_START = "torchrun --nproc-per-node N -m lachesis train CONFIG.yaml"


@dataclass(frozen=True, slots=True)
class World:
    """``size`` ranks over all nodes, ``local_size`` of them here; this is ``rank``, on device ``local_rank``.

    ``restarts`` counts how often torchrun has started all of them again; ``one_machine`` that a launcher
    says that they are all here.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int = 0
    one_machine: bool = False


def world_size(environment: Mapping[str, str]) -> int:
    """The processes that torchrun or accelerate started this one among, itself included.

    Raises:
        ConfigError: WORLD_SIZE is no number of processes.
    """
    text = environment.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"WORLD_SIZE is {text!r}, which is no number of processes",
            remedy=f"unset it, or start several devices with {HOW_TO_START}",
        )
    return int(text)


def find_world(environment: Mapping[str, str]) -> World | None:
    """Who torchrun says that this process is; None where it is alone.

    Raises:
        ConfigError: the variables are there in part, or are no numbers that belong together.
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
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, and what else torchrun sets is missing or no number: {error}",
            remedy=f"start several devices with {HOW_TO_START}, or unset WORLD_SIZE",
        ) from error
    if not 0 <= world.rank < world.size or not 0 <= world.local_rank < world.local_size <= world.size:
        raise ConfigError(
            f"rank {world.rank} of {world.size} (local rank {world.local_rank} of {world.local_size}) cannot be",
            remedy=f"start several devices with {HOW_TO_START}",
        )
    return world


def launchers_variables(environment: Mapping[str, str]) -> frozenset[str]:
    """Names of what a launcher has set for its ranks, which a process that one of them starts is none of.

    With TORCHELASTIC_USE_AGENT_STORE a process takes torchrun's store for its own, and waits there for ever.
    """
    return frozenset(name for name in environment if name.startswith(_OF_TORCHRUN))
