"""The parts of a run, each built from its section of the configuration. :mod:`lachesis.run.train` connects them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lachesis.common.contracts import Contract, load_part, spec_of
from lachesis.common.device import resolve_device
from lachesis.common.run_files import run_paths
from lachesis.common.types import Group, Prompt
from lachesis.config.custom import custom_parts
from lachesis.config.rules import learning_rate
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import rollout_steps, total_steps
from lachesis.engines.base import Engine
from lachesis.engines.build import ENGINE
from lachesis.metrics.custom import HEALTH_RULE, SINK
from lachesis.pipeline.feed import Feed
from lachesis.plugins import load
from lachesis.rollouts.base import ROLLOUTS
from lachesis.rollouts.evaluate import Evaluates, Evaluator, ScheduledEvaluation
from lachesis.rollouts.generation import reward_decoder
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.run.requests import take
from lachesis.run.sources import build_evaluated, sampling_params
from lachesis.train.batch import Batch
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.distributed.strategy import SingleDevice, Strategy
from lachesis.train.losses.custom import LOSS, load_custom_loss
from lachesis.train.losses.custom_advantage import ADVANTAGE
from lachesis.train.model.loading import LoadedModel, WeightSource, load_model, load_teacher
from lachesis.train.model.repeatable import require_long_factors
from lachesis.train.optim.custom import OPTIMIZER
from lachesis.train.optim.optimizer import Start
from lachesis.train.optim.sharding import build_sharded_optimizer
from lachesis.train.pack import pack_batch
from lachesis.train.policy import Policy
from lachesis.train.resume import RunCheckpoints

logger = logging.getLogger("lachesis")


def build_policy(
    config: LachesisConfig,
    *,
    weights: WeightSource | None = None,
    strategy: Strategy | None = None,
    make: Callable[..., Policy] = Policy,
) -> Policy:
    """Load the model, or build it on ``weights``, and make it a trainable policy.

    Args:
        strategy: the strategy of several ranks, which all call this; a single process if unset.
        make: the policy's class.
    """
    strategy = strategy or SingleDevice()
    loaded = load_model(config.model, config.adapter, weights=weights, sharded=strategy.sharded)
    require_long_factors(loaded.transformer, getattr(config.engine, "max_model_len", None))
    return policy_of(loaded, config, strategy=strategy, make=make)


def policy_of(
    loaded: LoadedModel, config: LachesisConfig, *, strategy: Strategy, make: Callable[..., Policy] = Policy
) -> Policy:
    """Make a loaded model a trainable policy; arguments as for :func:`build_policy`."""
    packing = "padded" if config.model.sees_images else config.model.packing
    length, loss = config.sampling.max_completion_length, config.algorithm.loss
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
        packing=packing,
        compile_layers=compiles(config, device=strategy.device(loaded.transformer)),
        custom_loss=load_custom_loss(loss, max_completion_length=length) if loss else None,
        teachers=_load_teachers(config, tokenizer=loaded.tokenizer, on_cpu=strategy.sharded),
    )
    if config.model.sees_images:
        told = f"{policy.plan.told}; it takes images, with one row per sequence, and its vision tower is"
        policy.plan = replace(policy.plan, told=f"{told} {config.model.vision}")
    policy.pack = partial(pack_batch, config=config, policy=policy)
    policy.optimizer.start = Start(config.sft_steps, config.sft.learning_rate)
    return policy


def _load_teachers(
    config: LachesisConfig, *, tokenizer: PreTrainedTokenizerBase, on_cpu: bool
) -> dict[str, PreTrainedModel]:
    """Load the teachers that are models beside the policy, by source; a model that several sources name loads once."""
    held = {name: one for name, one in config.algorithm.all_teachers.items() if one.kind == "model"}
    distinct = {(one.model, one.revision): one for one in held.values()}
    models = {key: load_teacher(one, config.model, tokenizer=tokenizer, on_cpu=on_cpu) for key, one in distinct.items()}
    return {name: models[one.model, one.revision] for name, one in held.items()}


def compiles(config: LachesisConfig, *, device: torch.device) -> bool:
    """Return True if decoder layers are compiled for a model on ``device``."""
    return config.model.compile == "on" or (config.model.compile == "auto" and device.type == "cuda")


def build_checkpoints(config: LachesisConfig, *, run_dir: Path, policy: Policy, feed: Feed[Batch]) -> RunCheckpoints:
    """Build the checkpoints that save the run and resume it.

    Raises:
        ConfigError: all ranks must write into the run directory, but some cannot see it.
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
    """Build the evaluation: completions of held-out problems (greedy by default), and the configured benchmarks.

    ``keep`` is called with the groups of each evaluation. Environments with held-out tasks bring an ``evaluator``.
    """
    if held_out and rewarder is not None:
        temperature = config.evaluation.temperature
        params = replace(sampling_params(config, policy), temperature=temperature, routed_experts=False)
        evaluator = Evaluator(
            problems=held_out,
            engine=engine,
            rewarder=rewarder,
            decode=reward_decoder(policy.tokenizer, config.rewards.special_tokens),
            params=params,
            samples=config.evaluation.samples_per_problem,
            success_reward=config.evaluation.success_reward,
            limit=config.evaluation.max_problems,
            seed=config.run.seed,
            generation_s=config.deadlines.generation_s,
            episodes=build_evaluated(config, params, policy=policy, engine=engine, rewarder=rewarder),
            keep=keep,
        )
    return ScheduledEvaluation(
        evaluator,
        every_steps=config.evaluation.every_steps,
        last_step=total_steps(config),
        benchmarks=load("benchmarks", "suite")(config, policy=policy, engine=engine)
        if config.evaluation.benchmarks
        else None,
    )


def with_activations(config: LachesisConfig, *, devices: int) -> LachesisConfig:
    """Resolve ``model.activations: auto`` for training on ``devices`` devices, and log the choice."""
    if config.model.kept_activations != "auto":
        return config
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return config.model_copy(update={"model": config.model.model_copy(update={"activations": "keep"})})
    from lachesis.plan.cards import GB, decide_activations

    card_gb = torch.cuda.get_device_properties(device).total_memory / GB
    decided = decide_activations(config, card_gb=card_gb, devices=devices)
    logger.info("[TRAIN] model.activations: auto means %s on a %.0f GB GPU", decided.model.activations, card_gb)
    return decided


# Rewards are not here: lachesis.rollouts.rewards loads them, with names, arguments by column, and worker processes.
CONTRACTS: Mapping[str, Contract] = {
    wanted.kind: wanted for wanted in (ROLLOUTS, ADVANTAGE, LOSS, OPTIMIZER, SINK, HEALTH_RULE, ENGINE)
}


@dataclass(frozen=True, slots=True)
class Named:
    """A part and the key that names it. ``place`` is the key's position in the file, empty if unknown."""

    kind: str
    key: str
    spec: str


def check_custom_parts(config: LachesisConfig) -> tuple[Named, ...]:
    """Load each custom part that the configuration names, except rewards, and check its signature.

    Raises:
        ConfigError: a part cannot be found or imported, or has the wrong signature.
    """
    return tuple(_checked(config))


def _checked(config: LachesisConfig) -> Iterator[Named]:
    for kind, key, given in custom_parts(config):
        if kind.name in CONTRACTS:
            load_part(given, CONTRACTS[kind.name])
            yield Named(kind.name, key, spec_of(given)[0])
