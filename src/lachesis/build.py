"""One part of a run from its section of the configuration. :mod:`lachesis.run` wires the parts together."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from lachesis.bridges.base import Bridge
from lachesis.bridges.in_process import InProcessBridge
from lachesis.bridges.proof import SyncProof
from lachesis.config.rules import learning_rate
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.engines.embedded import EmbeddedEngine
from lachesis.errors import ConfigError, DataError
from lachesis.pipeline.feed import Feed, SynchronousFeed
from lachesis.pipeline.scoring import AdvantageFunction, assign_advantages
from lachesis.rollouts.datasets import PromptStream, load_problems, split_eval
from lachesis.rollouts.evaluate import Evaluator, ScheduledEvaluation
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards import Rewarder, load_rewards
from lachesis.train.advantage import group_advantages
from lachesis.train.backends.single import SingleDevice
from lachesis.train.batch import Batch, pack
from lachesis.train.loss_options import LossOptions
from lachesis.train.model import context_length, eos_token_ids, load_model, load_tokenizer
from lachesis.train.optimizer import build_optimizer
from lachesis.train.policy import Policy
from lachesis.types import Group, Prompt, SamplingParams


def load_data(config: LachesisConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Problems to train on, and those held out.

    Raises:
        ConfigError: the model's context has no room for a prompt and a completion.
        DataError: as :func:`load_problems`, or nothing would remain to train on.
    """
    room = context_length(config.model) - config.sampling.max_completion_length
    if room < 1:
        raise ConfigError(
            f"sampling.max_completion_length is {config.sampling.max_completion_length} and the model's context "
            f"{context_length(config.model)} tokens: no prompt fits",
            remedy="lower sampling.max_completion_length",
        )
    load = partial(
        load_problems,
        prompt_column=config.data.prompt_column,
        tokenizer=load_tokenizer(config.model),
        chat_template_kwargs=config.data.chat_template_kwargs,
        max_prompt_length=min(room, config.data.max_prompt_length or room),
        overlong=config.data.overlong_prompts,
    )
    problems = load(config.data.path)
    if config.data.eval_path is not None:
        return problems, load(config.data.eval_path)
    if config.data.eval_size >= len(problems):
        raise DataError(
            f"data.eval_size is {config.data.eval_size}, but {config.data.path} has {len(problems)} problems",
            remedy="lower data.eval_size, so that something remains to train on",
        )
    return split_eval(problems, config.data.eval_size, seed=config.run.seed)


def build_rewarder(config: LachesisConfig) -> Rewarder:
    """The reward functions with their weights."""
    return Rewarder(
        load_rewards(config.rewards.functions),
        weights=config.rewards.weights,
        timeout_s=config.rewards.timeout_s,
        on_error=config.rewards.on_error,
    )


def build_policy(config: LachesisConfig) -> Policy:
    """Load the model and make it learn."""
    loaded = load_model(config.model, config.adapter)
    compile_layers = config.model.compile == "on" or (
        config.model.compile == "auto" and next(loaded.transformer.parameters()).is_cuda
    )
    return Policy(
        loaded,
        backend=SingleDevice(),
        optimizer_builder=partial(
            build_optimizer,
            config=config.optimizer,
            learning_rate=learning_rate(config),
            total_steps=config.run.steps,
        ),
        options=loss_options(config),
        packing=config.model.packing,
        compile_layers=compile_layers,
    )


def build_bridge(config: LachesisConfig) -> Bridge[Policy]:
    """The bridge, which builds the engine once the policy exists."""
    return InProcessBridge(
        engine_builder=partial(build_engine, config),
        proof_builder=partial(build_proof, config) if config.bridge.proof else None,
        sync_s=config.deadlines.sync_s,
    )


def build_engine(config: LachesisConfig, policy: Policy) -> Engine:
    """The embedded engine around the policy's model."""
    loaded = policy.loaded
    return EmbeddedEngine(
        loaded.transformer,
        eos_token_ids=eos_token_ids(loaded),
        pad_token_id=loaded.tokenizer.pad_token_id,
        max_batch_size=config.engine.max_batch_size,
        max_context=context_length(config.model),
        decode=loaded.tokenizer.decode,
        session_id=secrets.token_hex(8),
    )


def build_proof(config: LachesisConfig, policy: Policy, engine: Engine) -> SyncProof:
    """Proof of sync on a fixed prompt of ordinary tokens."""
    vocab_size = policy.transformer.config.get_text_config().vocab_size
    return SyncProof(
        token_ids=[(7 * i + 5) % vocab_size for i in range(min(16, context_length(config.model)))],
        trainer=policy.canary,
        engine=engine.canary,
        session_id=engine.health().session_id,
        dtype=str(policy.transformer.dtype).removeprefix("torch."),
    )


def build_feed(
    config: LachesisConfig, *, problems: Sequence[Prompt], policy: Policy, engine: Engine, rewarder: Rewarder
) -> Feed[Batch]:
    """The way from problems to packed batches."""
    source = LocalSource(
        stream=PromptStream(problems, seed=config.run.seed, shuffle=config.data.shuffle),
        engine=engine,
        rewarder=rewarder,
        decode=text_decoder(policy.loaded.tokenizer),
        params=sampling_params(config),
        num_generations=config.sampling.num_generations,
        seed=config.run.seed,
        generation_s=config.deadlines.generation_s,
    )
    return SynchronousFeed(
        source=source,
        prompts_per_step=config.batch.prompts_per_step,
        advantages=partial(assign_advantages, compute=advantage_function(config)),
        pack=partial(pack_batch, config=config, share_prompts=policy.plan.packed),
        batch_deadline_s=config.deadlines.batch_s,
    )


def build_evaluation(
    config: LachesisConfig, *, held_out: Sequence[Prompt], policy: Policy, engine: Engine, rewarder: Rewarder
) -> ScheduledEvaluation:
    """One completion for each held-out problem, greedy unless configured otherwise; never, without problems."""
    evaluator = None
    if held_out:
        evaluator = Evaluator(
            held_out,
            engine=engine,
            rewarder=rewarder,
            decode=text_decoder(policy.loaded.tokenizer),
            params=replace(sampling_params(config), temperature=config.evaluation.temperature),
            success_reward=config.evaluation.success_reward,
            limit=config.evaluation.max_problems,
            seed=config.run.seed,
            generation_s=config.deadlines.generation_s,
        )
    return ScheduledEvaluation(evaluator, every_steps=config.evaluation.every_steps, last_step=config.run.steps)


def loss_options(config: LachesisConfig) -> LossOptions:
    """The loss's options from the algorithm section."""
    algorithm = config.algorithm
    return LossOptions(
        loss_type=algorithm.loss_type,
        importance_sampling_level=algorithm.importance_sampling_level,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high,
        beta=algorithm.beta,
        use_bias_correction_kl=algorithm.use_bias_correction_kl,
        max_completion_length=config.sampling.max_completion_length,
    )


def sampling_params(config: LachesisConfig) -> SamplingParams:
    """How training samples."""
    sampling = config.sampling
    return SamplingParams(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
    )


def advantage_function(config: LachesisConfig) -> AdvantageFunction:
    """From rewards [N][K] (None: not judged) and group numbers [N] to advantages [N]."""
    weights = config.rewards.weights

    def compute(rewards: Sequence[Sequence[float | None]], group: Sequence[int]) -> list[float]:
        known = [[float("nan") if value is None else value for value in row] for row in rewards]
        return group_advantages(
            torch.tensor(known, dtype=torch.float64),
            group=torch.tensor(group),
            weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
            scale_rewards=config.algorithm.scale_rewards,
            aggregation=config.algorithm.aggregation,
        ).tolist()

    return compute


def pack_batch(groups: Sequence[Group], *, config: LachesisConfig, share_prompts: bool) -> Batch:
    """Pack as the batch section says. With a KL term every sequence has a gradient, so none is left out."""
    return pack(
        groups,
        max_tokens=config.batch.max_tokens_per_microbatch,
        max_rows=config.batch.micro_batch_size,
        skip_zero_advantage=config.algorithm.skip_zero_advantage and config.algorithm.beta == 0,
        share_prompts=share_prompts,
    )
