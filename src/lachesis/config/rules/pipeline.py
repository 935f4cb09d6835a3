"""Rules about the way from a prompt to a batch, and its source: a dataset, or environments over a rollout API."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lachesis.config.rules.base import Rule, Said, changed, note, problem, warning
from lachesis.config.schema import EpisodesSourceConfig, LachesisConfig, SamplingConfig
from lachesis.config.steps import batches_ahead, oldest_sample, prompts_per_generation, steps_per_batch

# Of the sampling section, what the trainer itself counts with.
_COUNTS = ("num_generations", "max_completion_length")


def _prefetch(config: LachesisConfig) -> Iterator[Said]:
    pipeline = config.pipeline
    if not pipeline.async_prefetch:
        for key in changed(config, "pipeline", "prefetch_depth", "max_staleness"):
            yield note(f"{key} does nothing while pipeline.async_prefetch is false")
        return
    if config.source.kind == "atropos":
        return  # _rollout_api says that it does nothing
    if pipeline.max_staleness is not None:
        yield from _staleness(config, limit=pipeline.max_staleness)
    if config.engine.place == "trainer":
        yield warning(
            f"pipeline.async_prefetch with engine.kind {config.engine.kind}: generation and training share one process "
            "and its weights, so little overlaps; use embedded_server or vllm"
        )
    correction = config.algorithm.sampler_correction
    if correction != "none" and "sampler_correction" not in config.algorithm.model_fields_set:
        yield note(
            f"pipeline.async_prefetch: completions are sampled by older weights than those that learn from them, and "
            f"algorithm.sampler_correction {correction} weighs each token by how its probability has changed since; "
            "none turns that off"
        )
    elif correction == "none" and not config.algorithm.loss_type.startswith("dppo"):
        yield warning(
            "pipeline.async_prefetch: completions are sampled by older weights than those that learn from them, and "
            "algorithm.sampler_correction none does not allow for that: the clip takes tokens out of the loss for "
            "their age alone; remove the key, and it is token_truncate"
        )


def _staleness(config: LachesisConfig, *, limit: int) -> Iterator[Said]:
    """Check that samples can be young enough at the last step that uses them, and how far ahead they may be made."""
    every, iterations = getattr(config.bridge, "every_steps", 1), steps_per_batch(config)
    depth = config.pipeline.prefetch_depth
    oldest = oldest_sample(every_steps=every, depth=depth, iterations=iterations)
    # A batch begins at a multiple of the iterations, so no later than this after a transfer.
    untransferred = every - math.gcd(every, iterations)
    ahead = batches_ahead(every_steps=every, depth=depth, iterations=iterations, max_staleness=limit)
    if untransferred + iterations - 1 > limit:
        yield problem(
            f"bridge.every_steps {every} and {iterations} step(s) on each generation make samples up to "
            f"{untransferred + iterations - 1} versions old at their last use, whatever is generated when, and "
            f"pipeline.max_staleness is {limit}; set it to {oldest}, or transfer more often"
        )
    elif ahead == 0:
        yield note(
            f"pipeline.max_staleness {limit} lets nothing be generated ahead: the run is as synchronous as without "
            f"async_prefetch; one batch ahead is up to "
            f"{oldest_sample(every_steps=every, depth=1, iterations=iterations)} versions old"
        )
    elif ahead < depth:
        yield warning(
            f"pipeline.prefetch_depth {depth}, {iterations} step(s) on each generation and a transfer every {every} "
            f"step(s) would make samples up to {oldest} versions old, and max_staleness {limit} lets {ahead} "
            "batch(es) be generated ahead; raise it, or lower prefetch_depth"
        )


def _streaming(config: LachesisConfig) -> Iterator[Said]:
    pipeline, prompts = config.pipeline, prompts_per_generation(config)
    if not pipeline.streaming:
        for key in changed(config, "pipeline", "streaming_min_groups"):
            yield note(f"{key} does nothing while pipeline.streaming is false")
    elif config.source.kind == "atropos":
        yield warning("pipeline.streaming does nothing with source.kind atropos: the environments score their groups")
    elif config.source.kind == "agent":
        yield warning("pipeline.streaming does nothing with source.kind agent, which plays all rollouts together")
    elif config.source.kind == "local" and config.source.tools:
        yield warning("pipeline.streaming does nothing with source.tools, which plays all rollouts of a batch together")
    elif config.source.kind == "local" and config.source.rollout_func is not None:
        yield warning(
            "pipeline.streaming does nothing with source.rollout_func, which gives all groups of a batch at once"
        )
    elif pipeline.streaming_min_groups >= prompts:
        remedy = "lower it" if prompts > 1 else "raise batch.prompts_per_step: of one prompt nothing can come earlier"
        yield warning(
            f"pipeline.streaming_min_groups {pipeline.streaming_min_groups} is not below the {counted(prompts)} "
            f"generated at once, so no group is scored before all of them are generated; {remedy}"
        )


def counted(prompts: int) -> str:
    return "one prompt that is" if prompts == 1 else f"{prompts} prompts that are"


def _replay(config: LachesisConfig) -> Iterator[Said]:
    pipeline = config.pipeline
    if pipeline.replay_size == 0:
        for key in changed(config, "pipeline", "replay_recompute_logps"):
            yield note(f"{key} does nothing while pipeline.replay_size is 0")
        return
    if not pipeline.replay_recompute_logps:
        yield warning(
            "pipeline.replay_recompute_logps is false: replayed groups are compared with the policy of their first "
            "use, so ratios are far from 1 and the clip cuts most of them; leave it true"
        )
    if pipeline.refill_zero_signal > 0:
        yield note(
            "pipeline.refill_zero_signal and replay_size both replace groups without signal: new ones first, then "
            "replayed ones for what is still without"
        )


def _reroll(config: LachesisConfig) -> Iterator[Said]:
    pipeline, prompts = config.pipeline, prompts_per_generation(config)
    if pipeline.reroll_start_fraction == 1:
        for key in changed(config, "pipeline", "reroll_max_groups"):
            yield note(f"{key} does nothing while pipeline.reroll_start_fraction is 1")
        return
    if config.source.kind == "atropos":
        yield problem(
            "pipeline.reroll_start_fraction below 1 tries prompts again, and source.kind is atropos, whose protocol "
            "cannot take a prompt back; set it to 1"
        )
    if pipeline.reroll_max_groups > prompts:
        yield problem(
            f"pipeline.reroll_max_groups {pipeline.reroll_max_groups} is more than the {counted(prompts)} "
            "generated at once; lower it"
        )


def _source(config: LachesisConfig) -> Iterator[Said]:
    source = config.source
    if config.data.curriculum != "none" and (source.kind == "atropos" or getattr(source, "rollout_func", None)):
        yield problem(
            f"data.curriculum {config.data.curriculum} chooses among problems that this run draws and scores itself, "
            "not those of source.kind atropos or a rollout_func; remove it"
        )
    if source.kind == "local" or source.kind == "agent":  # one by one, which narrows the type
        if (config.rewards.num_workers or 0) > config.batch.prompts_per_step:
            yield note(
                f"rewards.num_workers {config.rewards.num_workers} is more than a batch has groups "
                f"({config.batch.prompts_per_step}), which are not split: some workers are idle"
            )
        return
    if isinstance(source, EpisodesSourceConfig):
        yield from _environment(config)
        return
    if not config.data.evaluates:
        yield from _kept_tokens(config)
    if not config.data.evaluates and (config.data.path is not None or config.rewards.functions):
        yield warning("data and rewards do nothing with source.kind atropos: the environments have their own")
    if config.data.evaluates and not config.rewards.functions:
        yield problem("held-out problems are scored by rewards.functions, and there are none; set them")
    yield from _epochs(config)
    room = config.sampling.max_completion_length + (config.data.max_prompt_length or 0)
    if changed(config, "sampling", "max_completion_length") and room > source.max_sequence_length:
        yield note(
            f"source.max_sequence_length {source.max_sequence_length} is less than a longest sequence ({room} tokens); "
            "the environments decide how long completions are"
        )


def _kept_tokens(config: LachesisConfig) -> Iterator[Said]:
    """Refuse to keep special tokens where the completions that are scored are decoded by others."""
    if config.rewards.special_tokens == "keep":
        yield problem(
            f"rewards.special_tokens keep does nothing with source.kind {config.source.kind}, whose environments "
            "decode and score completions themselves; leave it out, and make the environment keep them"
        )


def _epochs(config: LachesisConfig) -> Iterator[Said]:
    """Refuse keys that count epochs if there is no dataset."""
    for section, steps in (("run", "steps"), ("checkpoint", "every_steps"), ("evaluation", "every_steps")):
        epochs = "epochs" if section == "run" else "every_epochs"
        if getattr(getattr(config, section), epochs) is not None:
            yield problem(
                f"{section}.{epochs} counts problems of a dataset, and source.kind {config.source.kind} has none; "
                f"set {section}.{steps}"
            )


def _environment(config: LachesisConfig) -> Iterator[Said]:
    """Check keys that do nothing, or cannot work, if an environment has its own tasks and rewards."""
    kind = config.source.kind
    if kind == "verifiers":
        yield from _kept_tokens(config)
    if kind == "verifiers" and (config.data.path is not None or config.data.evaluates or config.rewards.functions):
        yield problem(
            "data and rewards are of a dataset, and source.kind verifiers has an environment with its own tasks and "
            "rubric; remove them (source.eval_tasks holds tasks out)"
        )
    if kind != "verifiers" and (config.data.path is not None or config.data.evaluates):
        todo = "name them in source.tasks" if kind == "steps" else "remove the keys of data"
        yield problem(
            f"data.path and held-out problems are of a dataset, and source.kind {kind} has its own tasks; {todo} "
            "(source.eval_tasks holds tasks out)"
        )
    if kind == "steps" and config.rewards.num_workers:
        yield problem(
            f"rewards.num_workers is {config.rewards.num_workers}, and functions get the environments of source.kind "
            "steps, which cannot be sent to other processes; leave it out"
        )
    yield from _epochs(config)
    for key in changed(config, "evaluation", "samples_per_problem", "temperature"):
        yield problem(f"{key}: an environment's held-out tasks are played once each, greedily; remove it")
    if config.pipeline.streaming:
        yield warning(f"pipeline.streaming does nothing with source.kind {kind}: rollouts are scored as they end")


def _rollout_api(config: LachesisConfig) -> Iterator[Said]:
    """Check keys that do something else, or nothing, if environments push the groups."""
    source, pipeline, data = config.source, config.pipeline, config.data
    if source.kind != "atropos":
        return
    if config.engine.place == "trainer":
        yield problem(
            f"source.kind is atropos, whose environments generate over HTTP, and engine.kind {config.engine.kind} "
            "lives in the trainer's process and has no address; set engine.kind: embedded_server or vllm, which the "
            "run starts, or http for a server that runs already, each with a bridge such as bridge.kind: shared_vllm"
        )
    if pipeline.async_prefetch:
        yield note(
            "pipeline.async_prefetch, prefetch_depth and max_staleness do nothing with source.kind atropos: "
            "environments generate while the trainer trains in any case, and bound themselves how far ahead they are "
            "(--env.max_batches_offpolicy)"
        )
    if pipeline.refill_zero_signal > 0:
        yield warning(
            "pipeline.refill_zero_signal does nothing with source.kind atropos: environments cannot be asked for other "
            "groups; replay_size replaces those without signal"
        )
    keys = [*changed(config, "batch", "prompts_per_step"), *changed(config, "sampling", "num_generations")]
    if keys and source.batch_size is not None:
        yield note(
            f"{' and '.join(keys)} do{'es' if len(keys) == 1 else ''} nothing: source.batch_size says how many "
            "completions a batch has, and environments how many a group"
        )
    names = ["temperature"] if data.evaluates else [n for n in SamplingConfig.model_fields if n not in _COUNTS]
    by_length = config.algorithm.normalization or config.algorithm.loss_type
    if by_length not in ("constant_length", "dr_grpo") and not data.evaluates:
        names.append("max_completion_length")
    if keys := changed(config, "sampling", *names):
        yield note(
            f"{', '.join(keys)}: with source.kind atropos the environments decide how they sample; give it to them"
        )
    if data.evaluates and data.path is None and data.eval_path is None:
        yield problem("data.eval_split and data.eval_size are of data.path, which is missing; set data.eval_path")
    if data.path is not None and data.eval_path is not None:
        yield note("data.path does nothing with source.kind atropos: the environments have their own problems")


PIPELINE_RULES: tuple[Rule, ...] = (_prefetch, _streaming, _replay, _reroll, _source, _rollout_api)
