"""Rules about sources and the pipeline from prompt to batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lachesis.config.rules.base import Rule, Said, changed, note, problem, warning
from lachesis.config.schema import LachesisConfig, SamplingConfig
from lachesis.config.steps import batches_ahead, oldest_sample, steps_per_batch

# The keys of the sampling section that the trainer itself uses.
_COUNTS = ("num_generations", "max_completion_length")


def _prefetch(config: LachesisConfig) -> Iterator[Said]:
    """Check max_staleness against the last step on each sample, and the number of batches generated ahead."""
    limit = config.pipeline.max_staleness
    if not config.pipeline.async_prefetch or config.source.kind == "atropos" or limit is None:
        return
    every, iterations = getattr(config.bridge, "every_steps", 1), steps_per_batch(config)
    depth = config.pipeline.prefetch_depth
    oldest = oldest_sample(every_steps=every, depth=depth, iterations=iterations)
    # A batch begins at a multiple of the iterations, so at most this many steps after a transfer.
    untransferred = every - math.gcd(every, iterations)
    ahead = batches_ahead(every_steps=every, depth=depth, iterations=iterations, max_staleness=limit)
    if untransferred + iterations - 1 > limit:
        yield problem(
            f"bridge.every_steps {every} and {iterations} step(s) on each generation make samples up to "
            f"{untransferred + iterations - 1} versions old at their last use even without generating ahead, but "
            f"pipeline.max_staleness is {limit}; set it to {oldest}, or transfer more often"
        )
    elif ahead == 0:
        yield note(
            f"pipeline.max_staleness {limit} allows nothing to be generated ahead: the run is as synchronous as "
            "without async_prefetch; one batch ahead makes samples up to "
            f"{oldest_sample(every_steps=every, depth=1, iterations=iterations)} versions old"
        )
    elif ahead < depth:
        yield warning(
            f"pipeline.prefetch_depth {depth}, {iterations} step(s) on each generation and a transfer every {every} "
            f"step(s) would make samples up to {oldest} versions old, but max_staleness {limit} allows only {ahead} "
            "batch(es) ahead; raise it, or lower prefetch_depth"
        )


def _rollout_api(config: LachesisConfig) -> Iterator[Said]:
    """Note the keys of sampling that do nothing if environments push the groups."""
    data, algorithm = config.data, config.algorithm
    if config.source.kind != "atropos":
        return
    names = ["temperature"] if data.evaluates else [n for n in SamplingConfig.model_fields if n not in _COUNTS]
    by_length = algorithm.normalization or algorithm.loss_type
    if by_length not in ("constant_length", "dr_grpo") and not data.evaluates:
        names.append("max_completion_length")
    if keys := changed(config, "sampling", *names):
        yield note(
            f"{', '.join(keys)}: with source.kind atropos the environments choose their sampling; configure it there"
        )


PIPELINE_RULES: tuple[Rule, ...] = (_prefetch, _rollout_api)
