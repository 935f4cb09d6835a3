"""Sinks of a run's steps: files, consoles, dashboards, and the health rules."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from lachesis.bridges.proof import coarser_quantization
from lachesis.common.run_files import run_paths
from lachesis.common.types import Group, StepRecord
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import steps_per_batch, total_steps
from lachesis.metrics.custom import custom_rules, custom_sinks
from lachesis.metrics.health.monitor import HealthMonitor
from lachesis.metrics.health.rules import TURN_MARKS
from lachesis.metrics.health.types import HealthLimits
from lachesis.metrics.hub import MetricsHub, Sink
from lachesis.metrics.sinks.console import CompletionPicker, CompletionsSink, ConsoleSink
from lachesis.metrics.sinks.jsonl import JsonlSink, read_metrics
from lachesis.metrics.sinks.tape import TapeSink, token_texts, write_groups
from lachesis.plugins import load
from lachesis.rollouts.generation import text_decoder
from lachesis.run.directory import RunDirectory

logger = logging.getLogger("lachesis")

# Logprobs differ by about 0.1 nats in the mean if one side has NF4 weights or multiplies in float8; with int8 weights
# the usual limit holds.
ROUNDED_LOGPROB_DIFF = 0.3
# A clip range below this clips a third of the ratios or more in healthy training.
NARROW_CLIP = 0.1
PPO_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "gmpo")


def build_sinks(
    config: LachesisConfig,
    *,
    run: RunDirectory,
    start: int,
    consoles: Sequence[Console | None],
    tokenizer: PreTrainedTokenizerBase,
    reward_names: Sequence[str],
) -> MetricsHub:
    """Build the sinks that get the metrics of each step, and the health rules.

    Args:
        config: the configuration, with a number of steps.
        run: the run directory to write to.
        start: number of finished steps; existing data up to it is kept.
        consoles: consoles for progress.
        tokenizer: decodes tokens for recorded rollouts and shown completions.
        reward_names: names of the reward functions, in the order of a sample's rewards.
    """
    files, logging_config = run.files, config.logging
    resume_step = start if start > 0 else None
    completions = _completion_picker(config, reward_names=reward_names, tokenizer=tokenizer)
    # An error of the first sink ends the run: if it cannot write, the others cannot either.
    sinks: list[Sink] = [StateSink(run), JsonlSink(files["metrics"], resume_step=resume_step)]
    if logging_config.tape:
        texts, report_groups = token_texts(tokenizer), logging_config.report_groups
        sinks.append(TapeSink(files["rollouts"], resume_step=resume_step, report_groups=report_groups, texts=texts))
    if logging_config.tensorboard:
        sinks.append(load("sinks", "tensorboard")(files["tensorboard"], resume_step=resume_step))
    sinks += _services(config, run=run, resume_step=resume_step, completions=completions)
    sinks += custom_sinks(
        logging_config.sinks, run_dir=run.path, settings=config.model_dump(mode="json"), resume_step=resume_step
    )
    sinks += [load("sinks", "report")(run.path, logging_config.report_every_steps)]
    for console in consoles:
        if console is not None:
            sinks.append(ConsoleSink(console, total_steps(config), every_steps=logging_config.every_steps))
            sinks += [CompletionsSink(console, completions)] if completions is not None else []
    limits = replace(health_limits(config), template_marks=template_marks(tokenizer))
    monitor = HealthMonitor(limits=limits, custom=custom_rules(logging_config.health_rules))
    if resume_step is not None:
        # Evaluations before a resume count when looking for a fall from the best accuracy.
        for result in read_metrics(files["metrics"]).evaluations:
            monitor.evaluation(result)
    return MetricsHub(sinks, monitor=monitor)


def _services(
    config: LachesisConfig, *, run: RunDirectory, resume_step: int | None, completions: CompletionPicker | None
) -> list[Sink]:
    """Build the sinks of the experiment trackers that the configuration names."""
    wandb, trackio = config.logging.wandb, config.logging.trackio
    shared: dict[str, Any] = {
        "run_name": config.run.name,
        "settings": config.model_dump(mode="json"),
        "resume_step": resume_step,
        "completions": completions,
    }
    sinks: list[Sink] = []
    if wandb is not None and wandb.is_wanted():
        sinks.append(load("sinks", "wandb")(wandb, run_dir=run.path, **shared))
    if trackio is not None:
        sinks.append(load("sinks", "trackio")(trackio, **shared))
    return sinks


def template_marks(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the tokens that mark turns, or None if the tokenizer came without a chat template.

    The template is the tokenizer's original, not one set by the configuration.
    """
    own = tokenizer.init_kwargs.get("chat_template")
    if own is None:
        return None
    tokens = (token for token in tokenizer.get_vocab() if TURN_MARKS.fullmatch(token))
    return frozenset(tokens) | frozenset(TURN_MARKS.findall(str(own)))


def health_limits(config: LachesisConfig) -> HealthLimits:
    """Return the limits above which a run reports stale samples, and disagreement between trainer and engine.

    The staleness limit follows the configured staleness; the disagreement limit is higher if only one side rounds its
    products or base weights. The other limits depend on the algorithm.
    """
    engine, pipeline, algorithm = config.engine, config.pipeline, config.algorithm
    kind = coarser_quantization(config, rounds=engine.rounds if engine.kind == "vllm" else 0)
    wanted = max(HealthLimits().staleness, steps_per_batch(config) - 1)
    products = algorithm.importance_sampling_level == "sequence_product"
    # DPPO's bound of 0.05 nats is not a bound on ratios, and not narrow.
    narrow = algorithm.tightest_clip < NARROW_CLIP and algorithm.loss_type != "dppo_kl"
    limits = HealthLimits(
        staleness=max(wanted, pipeline.max_staleness or 0) if pipeline.async_prefetch else wanted,
        sync_every=getattr(config.bridge, "every_steps", 1),
        environments=config.source.kind == "atropos",
        clipped_fraction=None if products or narrow else HealthLimits().clipped_fraction,
        ratio_of_tokens=not products,
        clips=algorithm.loss_type in PPO_CLIPS,
        group_baseline=algorithm.baseline != "none",
        unscaled=algorithm.scale_rewards in ("none", "signal"),
    )
    apart = kind != "none" and config.engine.place != "trainer"
    if config.model.matmul_dtype != "auto" or (apart and kind != "int8"):
        limits = replace(limits, logprob_diff=ROUNDED_LOGPROB_DIFF)
    return limits


def _completion_picker(
    config: LachesisConfig, *, reward_names: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> CompletionPicker | None:
    """Return the picker of completions to show; None if none are shown."""
    count, decode = config.logging.completions, text_decoder(tokenizer)
    if count == 0:
        return None
    return CompletionPicker(
        count=None if count == "all" else count,
        reward_names=reward_names,
        decode=lambda token_ids: decode([list(token_ids)])[0],
        every_steps=config.logging.every_steps,
    )


def keep_evaluation(run_dir: Path, step: int, groups: Sequence[Group]) -> None:
    """Write the groups of an evaluation to RUN/evaluations/. If that fails, log a warning and continue."""
    try:
        write_groups(run_paths(run_dir)["evaluations"], step, groups)
    except OSError as error:
        logger.warning("the completions of the evaluation at step %d are not kept: %s", step, error)


class StateSink(Sink):
    """A sink that updates state.json at most once a second, because each update is synced to disk."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._written = 0.0

    def write(self, record: StepRecord) -> None:
        self._run.check_there()
        self._run.state["step"] = record.step  # for the next update
        if time.monotonic() - self._written >= 1.0:
            self._run.update(step=record.step)
            self._written = time.monotonic()
