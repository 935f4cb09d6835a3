"""One part of a run from its section of the configuration. :mod:`lachesis.run.train` wires the parts together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lachesis.common.run_files import run_paths
from lachesis.common.types import Group, Prompt
from lachesis.config.rules import learning_rate
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import prompts_per_generation, rollout_steps, total_steps
from lachesis.engines.base import Engine
from lachesis.pipeline.collect import Collector, Reroll
from lachesis.pipeline.feed import Feed, Finisher, SynchronousFeed
from lachesis.pipeline.filters import any_reward_differs, has_signal
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.pipeline.replay import ReplayBuffer
from lachesis.rollouts.base import GroupwiseSource
from lachesis.rollouts.evaluate import Evaluates, Evaluator, ScheduledEvaluation
from lachesis.rollouts.generation import reward_decoder
from lachesis.rollouts.partial_rollouts import KeptRollouts
from lachesis.rollouts.record_store import RecordStore
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.run.requests import take
from lachesis.run.sources import build_player, build_source, generated_ahead, load_answers, sampling_params
from lachesis.run.teacher import Teach
from lachesis.train.batch import Batch
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.distributed.strategy import SingleDevice, Strategy
from lachesis.train.iterations import Pack, RepeatedFeed, undivided
from lachesis.train.losses.advantage import advantage_function, assign_advantages
from lachesis.train.losses.custom import load_custom_loss
from lachesis.train.losses.custom_advantage import custom_assigner, load_custom_advantage
from lachesis.train.model.loading import (
    LoadedModel,
    WeightSource,
    context_length,
    eos_token_ids,
    load_model,
    load_teacher,
)
from lachesis.train.optim.optimizer import Start
from lachesis.train.optim.sharding import build_sharded_optimizer
from lachesis.train.pack import pack_batch, pack_rollouts
from lachesis.train.policy import Policy
from lachesis.train.resume import RunCheckpoints
from lachesis.train.sft import StartedFeed, demonstrations


def build_policy(
    config: LachesisConfig,
    *,
    weights: WeightSource | None = None,
    strategy: Strategy | None = None,
    make: Callable[..., Policy] = Policy,
) -> Policy:
    """Load the model, or attach it to ``weights``, and make it learn.

    Args:
        strategy: of several ranks, all of which build; this process alone, if unset.
        make: the policy's class.
    """
    strategy = strategy or SingleDevice()
    loaded = load_model(config.model, config.adapter, weights=weights, sharded=strategy.sharded)
    return policy_of(loaded, config, strategy=strategy, make=make)


def policy_of(
    loaded: LoadedModel, config: LachesisConfig, *, strategy: Strategy, make: Callable[..., Policy] = Policy
) -> Policy:
    """Make a loaded model learn; arguments as :func:`build_policy`."""
    length, loss, taught = config.sampling.max_completion_length, config.algorithm.loss, config.algorithm.teacher
    policy = make(
        loaded,
        strategy=strategy,
        optimizer_builder=partial(
            build_sharded_optimizer,
            config=config.optimizer,
            strategy=strategy,
            learning_rate=learning_rate(config),
            total_steps=rollout_steps(config),
        ),
        options=config.algorithm,
        max_completion_length=length,
        packing=config.model.packing,
        compile_layers=compiles(config, device=strategy.device(loaded.transformer)),
        custom_loss=load_custom_loss(loss, max_completion_length=length) if loss else None,
        teacher=load_teacher(taught, config.model, tokenizer=loaded.tokenizer, on_cpu=strategy.sharded)
        if taught and taught.kind == "model"
        else None,
    )
    policy.pack = partial(pack_batch, config=config, policy=policy)
    policy.optimizer.start = Start(config.sft_steps, config.sft.learning_rate)
    return policy


def compiles(config: LachesisConfig, *, device: torch.device) -> bool:
    """Whether decoder layers are compiled, for a model that computes on ``device``."""
    return config.model.compile == "on" or (config.model.compile == "auto" and device.type == "cuda")


def repeated(
    feed: Feed[Batch], config: LachesisConfig, *, pack: Pack, score: Callable[[Batch], Batch] = lambda batch: batch
) -> Feed[Batch]:
    """The steps of each batch; a checkpoint looks the same whether it is one or several."""
    return RepeatedFeed(
        feed,
        num_iterations=config.algorithm.num_iterations,
        pack=pack,
        steps_per_generation=config.batch.steps_per_generation,
        seed=config.run.seed,
        score=score,
    )


def build_replay(config: LachesisConfig) -> ReplayBuffer | None:
    size = config.pipeline.replay_size
    return ReplayBuffer(size=size, seed=config.run.seed, signal=signal_function(config)) if size else None


def advantage_assigner(config: LachesisConfig) -> Callable[[Sequence[Group]], list[Group]]:
    """Sets the advantages of a step's groups."""
    if config.algorithm.advantage is not None:
        return custom_assigner(
            load_custom_advantage(config.algorithm.advantage),
            options=config.algorithm,
            weights=config.rewards.weights,
        )
    compute = advantage_function(config.algorithm, weights=config.rewards.weights)
    return partial(assign_advantages, compute=compute)


def signal_function(config: LachesisConfig) -> Callable[[Group], bool]:
    """Which groups can be learned from, by how their rewards become advantages."""
    return any_reward_differs if config.algorithm.aggregation == "normalize_then_sum" else has_signal


def build_kept(config: LachesisConfig, path: Path) -> KeptRollouts | None:
    """What is finished and not trained on yet, over a restart, in a file; nothing where no batch is generated ahead."""
    if config.source.kind == "atropos" or not config.pipeline.keep_partial or not generated_ahead(config):
        return None
    return KeptRollouts(RecordStore(path))


def build_feed(
    config: LachesisConfig,
    *,
    problems: Sequence[Prompt],
    policy: Policy,
    engine: Engine,
    rewarder: Rewarder,
    kept: KeptRollouts | None,
    teach: Teach = list,
) -> Feed[Batch]:
    """The way from problems to packed batches."""
    source = build_source(config, problems=problems, policy=policy, engine=engine, rewarder=rewarder)
    return feed_from(source, config, policy=policy, kept=kept, teach=teach)


def feed_from(
    source: GroupwiseSource,
    config: LachesisConfig,
    *,
    policy: Policy,
    kept: KeptRollouts | None,
    teach: Teach = list,
) -> Feed[Batch]:
    """The way from the groups of a source to packed batches."""
    pipeline = config.pipeline
    pack_groups = partial(pack_rollouts, config=config, policy=policy)
    collector = Collector(
        source,
        count=prompts_per_generation(config),
        refill_rounds=pipeline.refill_zero_signal,
        reroll=build_reroll(config),
        signal=signal_function(config),
    )
    finisher = Finisher(
        advantages=advantage_assigner(config),
        pack=pack_groups if config.batch.steps_per_generation == 1 else undivided,
        teach=teach,
        replay=build_replay(config),
    )
    feed: Feed[Batch] = SynchronousFeed(
        collector=collector, finisher=finisher, batch_deadline_s=config.deadlines.batch_s
    )
    if ahead := generated_ahead(config):
        source_config = config.source
        whole_batches = source_config.kind == "local" and bool(source_config.rollout_func or source_config.tools)
        feed = AsynchronousFeed(
            source=source,
            collector=collector,
            finisher=finisher,
            ahead=ahead,
            batch_deadline_s=config.deadlines.batch_s,
            # What shares the trainer's process, or calls functions of the user, does one call after the other.
            at_once=1 if whole_batches or config.engine.place == "trainer" else None,
            whole_batches=whole_batches,
            kept=kept,
        )
    return repeated(feed, config, pack=pack_groups, score=policy.recompute_logprobs)


def with_start(feed: Feed[Batch], config: LachesisConfig, *, problems: Sequence[Prompt], policy: Policy) -> Feed[Batch]:
    """The feed with a supervised start before it, where ``run.stages`` has one.

    Args:
        problems: with the answers, where ``sft.path`` names no other data.

    Raises:
        DataError: there is a problem without an answer, or with one that is too long.
    """
    if not config.sft_steps:
        return feed
    encode, end = partial(policy.tokenizer.encode, add_special_tokens=False), policy.tokenizer.eos_token_id
    answers = demonstrations(
        problems if config.sft.path is None else load_answers(config),
        column=config.sft.column,
        encode=encode,
        end=end if isinstance(end, int) else eos_token_ids(policy.loaded)[0],
        longest=context_length(config.model),
    )
    return StartedFeed(
        feed,
        answers=answers,
        steps=config.sft.steps,
        batch_size=config.sft.batch_size,
        pack=partial(pack_batch, config=config, policy=policy),
        seed=config.run.seed,
    )


def build_checkpoints(config: LachesisConfig, *, run_dir: Path, policy: Policy, feed: Feed[Batch]) -> RunCheckpoints:
    """What saves the run and goes on from it.

    Raises:
        ConfigError: ranks are to write into the run's directory, and some of them do not have it.
    """
    checkpoints = RunCheckpoints(
        CheckpointManager(run_paths(run_dir)["checkpoints"], keep_last=config.checkpoint.keep_last),
        policy=policy,
        feed=feed,
        every_steps=config.checkpoint_interval,
        max_share=config.checkpoint_share,
        asked=partial(take, run_dir, "checkpoint"),
        asynchronous=config.checkpoint.asynchronous,
        whole=config.checkpoint.format == "whole",
    )
    checkpoints.require_shared_disk()
    return checkpoints


def build_reroll(config: LachesisConfig) -> Reroll | None:
    """Prompts that failed are tried again once the given share of the run is over; never where that is all of it."""
    start = config.pipeline.reroll_start_fraction
    if start >= 1:
        return None
    return Reroll(start_step=math.ceil(total_steps(config) * start), max_groups=config.pipeline.reroll_max_groups)


def build_evaluation(
    config: LachesisConfig,
    *,
    held_out: Sequence[Prompt],
    policy: Policy,
    engine: Engine,
    rewarder: Rewarder | None,
    keep: Callable[[int, Sequence[Group]], None] | None = None,
    evaluator: Evaluates | None = None,
) -> ScheduledEvaluation:
    """One completion for each held-out problem, greedy unless configured otherwise; never, without problems.

    ``keep`` is given what each evaluation has generated. An environment that has held-out tasks of its own brings its
    ``evaluator``.
    """
    if held_out and rewarder is not None:
        evaluator = Evaluator(
            problems=held_out,
            engine=engine,
            rewarder=rewarder,
            decode=reward_decoder(policy.tokenizer, config.rewards.special_tokens),
            params=replace(
                sampling_params(config, policy), temperature=config.evaluation.temperature, routed_experts=False
            ),
            samples=config.evaluation.samples_per_problem,
            success_reward=config.evaluation.success_reward,
            limit=config.evaluation.max_problems,
            seed=config.run.seed,
            generation_s=config.deadlines.generation_s,
            turns=build_player(config, policy=policy, engine=engine, rewarder=rewarder),
            keep=keep,
        )
    return ScheduledEvaluation(evaluator, every_steps=config.evaluation.every_steps, last_step=total_steps(config))
