"""A run of several ranks: how they meet, and the part of the policy that each of them builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from lachesis.common.errors import LachesisError
from lachesis.common.world import World
from lachesis.config.rules.distributed import require_distributable
from lachesis.config.schema import LachesisConfig
from lachesis.run.parts import build_policy, set_up
from lachesis.train.distributed.control import (
    ControlGroup,
    abort_collectives,
    attempt_store,
    destroying_process_group,
    init_process_group,
    job_store,
    rank_device,
)
from lachesis.train.distributed.follower import Follower, ToldLeader
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.leader import BUILD, Leader, LeadingPolicy
from lachesis.train.distributed.strategy import Replicate, Strategy
from lachesis.train.model.loading import WeightSource
from lachesis.train.policy import Policy

__all__ = ["Leadership", "ToldLeader", "began_before", "follow", "leading"]

# How long a follower waits for the leader, before that one says how long ranks are to wait for one another.
_FIRST_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Leadership:
    """What rank 0 has beyond a run of one process."""

    world: World
    job: Store
    store: Store
    leader: Leader

    def build_policy(self, config: LachesisConfig, *, weights: WeightSource | None = None) -> Policy:
        """The policy of all ranks, built by all at once. ``weights`` has to be None, as rules demand."""
        assert weights is None, "config.rules.distributed refuses bridges that share weights"
        with self.leader.turn(BUILD, config.model_dump(mode="json"), what="building the policy"):
            return _build_policy(config, self.world, self.store, make=partial(LeadingPolicy, leader=self.leader))

    def note_begun(self, run_dir: Path) -> None:
        """Let later attempts of this torchrun know that the run in this directory is theirs."""
        self.job.set(_begun_key(run_dir), "begun")


def began_before(world: World, run_dir: Path) -> bool:
    """Whether an earlier attempt of this torchrun began the run in this directory, so that this one goes on with it."""
    if world.restarts == 0:
        return False
    return job_store(world, limit_s=_FIRST_LIMIT_S).check([_begun_key(run_dir)])


@contextmanager
def leading(world: World, config: LachesisConfig) -> Iterator[Leadership]:
    """Meet the followers. They are told when it ends, however it does.

    Raises:
        ConfigError: the configuration is none for several ranks.
        DeadlineExceeded: not all came in time.
    """
    require_distributable(config, ranks=world.size)
    rank_device(world, wanted=config.model.device)
    limit_s = config.deadlines.ranks_s
    job = job_store(world, limit_s=limit_s)
    store = attempt_store(world, job)
    leader = Leader(ControlGroup(world, store, limit_s=limit_s), abort=abort_collectives)
    with closing(leader), destroying_process_group():
        yield Leadership(world=world, job=job, store=store, leader=leader)
        leader.close()


def follow(world: World, *, end_process: Callable[[LachesisError], None]) -> None:
    """Take part in the run that rank 0 leads, to its end.

    Args:
        end_process: says what is wrong and ends this process, where nothing else would.

    Raises:
        LachesisError: as :meth:`Follower.follow`.
    """
    store = attempt_store(world, job_store(world, limit_s=_FIRST_LIMIT_S))
    control = ControlGroup(world, store, limit_s=_FIRST_LIMIT_S)
    with destroying_process_group():
        Follower(control, build=partial(_build, world, store), end_process=end_process).follow()


def _begun_key(run_dir: Path) -> str:
    return f"lachesis/begun/{run_dir.resolve()}"


def _build(world: World, store: Store, data: Mapping[str, Any]) -> tuple[Policy, int]:
    """The policy of a follower, and the run's seed."""
    config = LachesisConfig.model_validate(data)
    set_up(config)
    return _build_policy(config, world, store), config.run.seed


def _build_policy(
    config: LachesisConfig, world: World, store: Store, *, make: Callable[..., Policy] = Policy
) -> Policy:
    device = rank_device(world, wanted=config.model.device)
    init_process_group(world, store, device=device, limit_s=config.deadlines.ranks_s)
    replicate = config.distributed.strategy == "replicate"
    strategy: Strategy = Replicate(device) if replicate else Fsdp2(device, config.distributed)
    torch.manual_seed(config.run.seed)  # adapters begin alike on all ranks
    return build_policy(config, strategy=strategy, make=make)
