"""Rules about the way from a prompt to a batch, and its source."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lachesis.common.types import Finding
from lachesis.config.rules.base import Rule, changed, note, problem, warning
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import oldest_sample


def _prefetch(config: LachesisConfig) -> Iterator[Finding]:
    pipeline = config.pipeline
    if not pipeline.async_prefetch:
        for key in changed(config, "pipeline", "prefetch_depth", "max_staleness"):
            yield note("prefetch", f"{key} does nothing while pipeline.async_prefetch is false")
        return
    if config.source.kind == "atropos":
        return  # rules.rollout_api says that it does nothing
    if pipeline.max_staleness is not None:
        yield from _staleness(config, limit=pipeline.max_staleness)
    if config.engine.kind == "embedded":
        yield warning(
            "prefetch",
            "pipeline.async_prefetch with engine.kind embedded: generation and training share one process and its "
            "weights, so little overlaps; use embedded_server or vllm",
        )
    if config.algorithm.sampler_correction == "none":
        yield warning(
            "prefetch",
            "pipeline.async_prefetch with algorithm.sampler_correction none: the ratio is to the older weights that "
            "sampled, so the clip, and most of all GSPO's narrow one, also cuts what has only aged; token_truncate "
            "weights age apart from the step",
        )


def _staleness(config: LachesisConfig, *, limit: int) -> Iterator[Finding]:
    """Whether samples that are made ahead can be young enough at the last step that uses them."""
    every, iterations = getattr(config.bridge, "every_steps", 1), config.algorithm.num_iterations
    depth = config.pipeline.prefetch_depth
    oldest = oldest_sample(every_steps=every, depth=depth, iterations=iterations)
    # A batch begins at a multiple of the iterations, so no later than this after a transfer.
    untransferred = every - math.gcd(every, iterations)
    if limit < iterations:
        yield problem(
            "prefetch",
            f"pipeline.async_prefetch and algorithm.num_iterations {iterations} train on samples of weights at least "
            f"{iterations} version(s) old, and max_staleness {limit} drops them all; raise it, or generate "
            "synchronously",
        )
    elif untransferred + iterations - 1 > limit:
        yield problem(
            "prefetch",
            f"bridge.every_steps {every}: before a transfer all samples are up to {untransferred + iterations - 1} "
            f"versions old at their last use, and max_staleness {limit} drops them all, so the trainer waits for ever; "
            f"set max_staleness to {oldest}, or transfer more often",
        )
    elif oldest > limit:
        yield warning(
            "prefetch",
            f"pipeline.prefetch_depth {depth}, algorithm.num_iterations {iterations} and a transfer every {every} "
            f"step(s) make samples up to {oldest} versions old, and those older than max_staleness {limit} are "
            "dropped; raise it, or generate less far ahead",
        )


def _streaming(config: LachesisConfig) -> Iterator[Finding]:
    pipeline, prompts = config.pipeline, config.batch.prompts_per_step
    if not pipeline.streaming:
        for key in changed(config, "pipeline", "streaming_min_groups"):
            yield note("streaming", f"{key} does nothing while pipeline.streaming is false")
    elif config.source.kind == "atropos":
        yield warning(
            "streaming", "pipeline.streaming does nothing with source.kind atropos: the environments score their groups"
        )
    elif config.source.rollout_func is not None:
        yield warning(
            "streaming",
            "pipeline.streaming does nothing with source.rollout_func, which gives all groups of a batch at once",
        )
    elif pipeline.streaming_min_groups >= prompts:
        yield warning(
            "streaming",
            f"pipeline.streaming_min_groups {pipeline.streaming_min_groups} is not below batch.prompts_per_step "
            f"{prompts}, so no group is scored before all of them are generated; lower it",
        )


def _replay(config: LachesisConfig) -> Iterator[Finding]:
    pipeline = config.pipeline
    if pipeline.replay_size == 0:
        for key in changed(config, "pipeline", "replay_recompute_logps"):
            yield note("replay", f"{key} does nothing while pipeline.replay_size is 0")
        return
    if not pipeline.replay_recompute_logps:
        yield warning(
            "replay",
            "pipeline.replay_recompute_logps is false: replayed groups are compared with the policy of their first "
            "use, so ratios are far from 1 and the clip cuts most of them; leave it true",
        )
    if pipeline.refill_zero_signal > 0:
        yield note(
            "replay",
            "pipeline.refill_zero_signal and replay_size both replace groups without signal: new ones first, then "
            "replayed ones for what is still without",
        )


def _reroll(config: LachesisConfig) -> Iterator[Finding]:
    pipeline, prompts = config.pipeline, config.batch.prompts_per_step
    if pipeline.reroll_start_fraction == 1:
        for key in changed(config, "pipeline", "reroll_max_groups"):
            yield note("reroll", f"{key} does nothing while pipeline.reroll_start_fraction is 1")
        return
    if config.source.kind == "atropos":
        yield problem(
            "reroll",
            "pipeline.reroll_start_fraction below 1 tries prompts again, and source.kind is atropos, whose protocol "
            "cannot take a prompt back; set it to 1",
        )
    if pipeline.reroll_max_groups > prompts:
        yield problem(
            "reroll",
            f"pipeline.reroll_max_groups {pipeline.reroll_max_groups} is more than batch.prompts_per_step {prompts}; "
            "lower it",
        )


def _source(config: LachesisConfig) -> Iterator[Finding]:
    source = config.source
    if source.kind == "local":
        if config.rewards.num_workers > config.batch.prompts_per_step:
            yield note(
                "source",
                f"rewards.num_workers {config.rewards.num_workers} is more than a batch has groups "
                f"({config.batch.prompts_per_step}), which are not split: some workers are idle",
            )
        return
    evaluates = config.data.eval_path is not None or config.data.eval_split is not None or config.data.eval_size > 0
    if not evaluates and (config.data.path is not None or config.rewards.functions):
        yield warning("source", "data and rewards do nothing with source.kind atropos: the environments have their own")
    if evaluates and not config.rewards.functions:
        yield problem("source", "held-out problems are scored by rewards.functions, and there are none; set them")
    if config.run.epochs is not None:
        yield problem(
            "source", "run.epochs counts problems of a dataset, and source.kind atropos has none; set run.steps"
        )
    room = config.sampling.max_completion_length + (config.data.max_prompt_length or 0)
    if changed(config, "sampling", "max_completion_length") and room > source.max_sequence_length:
        yield note(
            "source",
            f"source.max_sequence_length {source.max_sequence_length} is less than a longest sequence ({room} tokens); "
            "the environments decide how long completions are",
        )


PIPELINE_RULES: tuple[Rule, ...] = (_prefetch, _streaming, _replay, _reroll, _source)
