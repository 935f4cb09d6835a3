"""Runs of several ranks: their rendezvous, and the part of the policy that each rank builds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lachesis.bridges.broadcast import PackBuckets
from lachesis.bridges.senders import SendsTogether
from lachesis.common.errors import LachesisError
from lachesis.common.world import World
from lachesis.config.installed import schema_of
from lachesis.config.rules.distributed import require_colocatable, require_distributable, shared_card
from lachesis.config.schema import LachesisConfig
from lachesis.engines.gpus import is_colocated
from lachesis.engines.serving.backend import TransferKind
from lachesis.run.launch import set_up
from lachesis.run.parts import build_policy
from lachesis.train.distributed.control import (
    ControlGroup,
    abort_collectives,
    destroying_process_group,
    init_process_group,
    rank_device,
)
from lachesis.train.distributed.follower import Follower, FollowingPolicy, ToldLeader
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.job import TOKEN_VARIABLE, Job, began_before, join_job
from lachesis.train.distributed.leader import BUILD, Leader, LeadingPolicy
from lachesis.train.distributed.strategy import Replicate, Strategy
from lachesis.train.model.loading import WeightSource
from lachesis.train.policy import Policy
from lachesis.transport.partners import SendPacked
from lachesis.transport.transports import SharedRoom

__all__ = ["Leadership", "ToldLeader", "began_before", "follow", "leading"]

logger = logging.getLogger("lachesis")

# How long a follower waits for the leader, in seconds, until the leader sends the configured deadline.
_FIRST_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Leadership:
    """Rank 0's means to lead the other ranks."""

    world: World
    job: Job
    leader: Leader

    def build_policy(self, config: LachesisConfig, *, weights: WeightSource | None = None) -> Policy:
        """Build the policy on all ranks at once. ``weights`` must be None; rules ensure it."""
        assert weights is None, "config.rules.distributed refuses bridges that share weights"
        with self.leader.turn(BUILD, config.model_dump(mode="json"), what="building the policy"):
            return _build_policy(config, self.world, self.job, make=partial(LeadingPolicy, leader=self.leader))

    def pack_buckets(self, config: LachesisConfig) -> PackBuckets[Policy] | None:
        """Return how ranks pack weights for engine workers on their GPUs; None if the workers run elsewhere."""
        return _pack_buckets if is_colocated(config, ranks=self.world.size) else None

    def together(self, policy: Policy) -> SendsTogether:
        """Return the policy in the form in which its ranks send its weights together."""
        assert isinstance(policy, LeadingPolicy), "rank 0 has the engine"
        return policy


def _pack_buckets(
    policy: Policy, kind: TransferKind, saved: bool, bucket_bytes: int, anew: bool, *, send: SendPacked
) -> None:
    assert isinstance(policy, LeadingPolicy), "rank 0 has the engine"
    policy.pack_buckets(kind, saved, bucket_bytes, anew, send=send)


@contextmanager
def leading(world: World, config: LachesisConfig) -> Iterator[Leadership]:
    """Wait for the followers to join, and release them when the block ends, with or without an error.

    Raises:
        ConfigError: the configuration does not work with this number of ranks.
        DeadlineExceeded: not all ranks joined in time.
    """
    require_distributable(config, ranks=world.size)
    require_colocatable(config, ranks=world.size, here=world.local_size)
    shared = shared_card(config, ranks=world.local_size, environment=os.environ)
    if rank_device(world, wanted=config.model.device).type == "cuda" and shared is not None:
        logger.warning("%s", shared)
    limit_s = config.deadlines.ranks_s
    job = join_job(world, limit_s=limit_s)
    if not job.secret:
        logger.warning("ranks trust any process that reaches their ports: set one secret %s for all", TOKEN_VARIABLE)
    control = ControlGroup(world, job.store, limit_s=limit_s, secret=job.secret)
    leader = Leader(control, abort=abort_collectives)
    with closing(leader), destroying_process_group():
        yield Leadership(world=world, job=job, leader=leader)
        leader.close()


def follow(world: World, *, end_process: Callable[[LachesisError], None]) -> None:
    """Take part in the run that rank 0 leads, until it ends.

    Args:
        end_process: reports an error and ends this process when nothing else can.

    Raises:
        LachesisError: as :meth:`Follower.follow`.
    """
    job = join_job(world, limit_s=_FIRST_LIMIT_S)
    control = ControlGroup(world, job.store, limit_s=_FIRST_LIMIT_S, secret=job.secret)
    with ExitStack() as closing, destroying_process_group():
        build = partial(_build, world, job, control, closing)
        Follower(control, build=build, end_process=end_process).follow()


def _build(
    world: World, job: Job, control: ControlGroup, closing: ExitStack, data: Mapping[str, Any]
) -> tuple[Policy, int]:
    """Build the policy of a follower and return it with the run's seed; ``closing`` closes what it opens."""
    config = schema_of(data).model_validate(data)
    set_up(config)
    room = SharedRoom(rank_device(world, wanted=config.model.device))
    closing.callback(room.close)
    make = partial(FollowingPolicy, control=control, room=room)
    return _build_policy(config, world, job, make=make), config.run.seed


def _build_policy(config: LachesisConfig, world: World, job: Job, *, make: Callable[..., Policy] = Policy) -> Policy:
    device = rank_device(world, wanted=config.model.device)
    limit_s = config.deadlines.ranks_s
    init_process_group(world, job.store, device=device, limit_s=limit_s, secret=job.secret)
    replicate = config.distributed.strategy == "replicate"
    strategy: Strategy = (Replicate if replicate else Fsdp2)(device, config.distributed)
    torch.manual_seed(config.run.seed)  # adapters start equal on all ranks
    return build_policy(config, strategy=strategy, make=make)
