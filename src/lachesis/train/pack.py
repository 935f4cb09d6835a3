"""Packed batches of groups, as a configuration asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.common.types import Group
from lachesis.config.schema import LachesisConfig
from lachesis.train.batch import Batch, pack
from lachesis.train.losses.teacher import shares, shares_by_source
from lachesis.train.policy import Policy
from lachesis.train.route_tensors import require_routed


def pack_rollouts(groups: Sequence[Group], *, config: LachesisConfig, policy: Policy) -> Batch:
    """Pack sampled groups as :func:`pack_batch` does.

    Raises:
        TrainingError: routing is to be replayed, and a sample lacks it.
    """
    if config.algorithm.router_replay:
        require_routed(groups)
    return pack_batch(groups, config=config, policy=policy)


def pack_batch(groups: Sequence[Group], *, config: LachesisConfig, policy: Policy) -> Batch:
    """Pack groups as the section ``batch`` asks; leave a sequence out only if that changes no gradient."""
    algorithm = config.algorithm
    mixture = {} if algorithm.teacher is None else {"shares": shares(algorithm.teacher)}
    if algorithm.teachers:
        mixture = {"shares": shares_by_source(algorithm.teachers)}
    # Bounds such as GSPO's are closer than two 16-bit passes over the same weights: there the engine's rounding would
    # decide which sequences are clipped; in a product of all ratios it adds up.
    level = algorithm.importance_sampling_level
    below_rounding = level == "sequence_product" or (level == "sequence" and algorithm.tightest_clip < 0.01)
    old_logprobs = "trainer" if below_rounding or algorithm.sampler_correction != "none" else "sampler"
    return pack(
        groups,
        ranks=policy.strategy.mesh.parts,
        max_tokens=config.batch.max_tokens_per_microbatch,
        max_rows=config.batch.micro_batch_size,
        skip_zero_advantage=algorithm.skip_zero_advantage and policy.ignores_zero_advantage,
        mask_truncated=algorithm.mask_truncated,
        share_prefixes=policy.plan.packed,
        old_logprobs=old_logprobs,
        replayed_old_logprobs="trainer" if config.pipeline.replay_recompute_logps else "sampler",
        **mixture,
    )
