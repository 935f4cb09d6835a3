"""A run of several ranks: how they meet, and the part of the policy that each of them builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lachesis.common.errors import LachesisError
from lachesis.common.imports import load_function
from lachesis.common.world import World
from lachesis.config.rules.distributed import require_distributable
from lachesis.config.schema import LachesisConfig
from lachesis.run.parts import build_policy
from lachesis.train.distributed.commands import Build
from lachesis.train.distributed.following import FIRST_LIMIT_S, Follower, ToldLeader
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.group import join, meet, rank_device
from lachesis.train.distributed.leading import LeadingPolicy
from lachesis.train.distributed.meeting import leaving, open_team, reach_leader
from lachesis.train.distributed.replicate import Replicate
from lachesis.train.distributed.strategy import Strategy
from lachesis.train.distributed.team import Team
from lachesis.train.model.attach import WeightSource
from lachesis.train.policy import Policy

__all__ = ["Leadership", "ToldLeader", "follow", "leading"]


@dataclass(frozen=True, slots=True)
class Leadership:
    """What rank 0 has beyond a run of one process."""

    world: World
    store: dist.Store
    team: Team

    def build_policy(self, config: LachesisConfig, *, weights: WeightSource | None = None) -> Policy:
        """The policy of all ranks, built by all at once. ``weights`` has to be None, as rules demand."""
        assert weights is None, "config.rules.distributed refuses bridges that share weights"
        with self.team.together("building the policy", Build(config.model_dump(mode="json"))):
            return _build_policy(config, self.world, self.store, make=partial(LeadingPolicy, team=self.team))


@contextmanager
def leading(world: World, config: LachesisConfig) -> Iterator[Leadership]:
    """Meet the followers. They are told when it ends, however it does.

    Raises:
        ConfigError: the configuration is none for several ranks.
        DeadlineExceeded: not all came in time.
    """
    require_distributable(config, ranks=world.size)
    rank_device(world, wanted=config.model.device)
    store = meet(world, limit_s=config.deadlines.ranks_s)
    team = open_team(world, store, limit_s=config.deadlines.ranks_s)
    with closing(team), leaving():
        yield Leadership(world=world, store=store, team=team)
        team.end()


def follow(world: World, *, end_process: Callable[[LachesisError], None]) -> None:
    """Take part in the run that rank 0 leads, to its end.

    Args:
        end_process: says what is wrong and ends this process, where nothing else would.

    Raises:
        LachesisError: as :meth:`Follower.follow`.
    """
    store = meet(world, limit_s=FIRST_LIMIT_S)
    link = reach_leader(world, store, limit_s=FIRST_LIMIT_S)
    with closing(link), leaving():
        Follower(link, rank=world.rank, build=partial(_build, world, store), end_process=end_process).follow()


def _build(world: World, store: dist.Store, data: Mapping[str, Any]) -> tuple[Policy, float, int]:
    """The policy of a follower, with what else it has to know of the configuration."""
    config = LachesisConfig.model_validate(data)
    if config.run.setup is not None:
        load_function(config.run.setup)(config.model.path)
    return _build_policy(config, world, store), config.deadlines.ranks_s, config.run.seed


def _build_policy(
    config: LachesisConfig, world: World, store: dist.Store, *, make: Callable[..., Policy] = Policy
) -> Policy:
    strategy = _join(world, store, config)
    torch.manual_seed(config.run.seed)  # adapters begin alike on all ranks
    return build_policy(config, strategy=strategy, make=make)


def _join(world: World, store: dist.Store, config: LachesisConfig) -> Strategy:
    """The strategy over the group of all ranks, which is made here."""
    device = rank_device(world, wanted=config.model.device)
    join(world, store, device=device, limit_s=config.deadlines.ranks_s)
    if config.distributed.strategy == "replicate":
        return Replicate(device)
    return Fsdp2(device, config.distributed)
