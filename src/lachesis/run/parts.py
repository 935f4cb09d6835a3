"""One part of a run from its section of the configuration. :mod:`lachesis.run.train` wires the parts together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch

from lachesis.common.contracts import load_part
from lachesis.common.errors import ConfigError
from lachesis.common.imports import load_function
from lachesis.common.sandbox.choice import use_sandbox
from lachesis.common.threads import Watch
from lachesis.common.types import Group, Prompt, SamplingParams
from lachesis.config import schema
from lachesis.config.rules import learning_rate
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import batches_ahead, prompts_per_generation, steps_per_batch, total_steps
from lachesis.engines.base import Engine
from lachesis.pipeline.collect import Collector, Reroll, WholeBatches
from lachesis.pipeline.feed import Feed, Finisher, SynchronousFeed
from lachesis.pipeline.filters import any_reward_differs, has_signal
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.pipeline.replay import ReplayBuffer
from lachesis.rollouts.agent.process import AgentCommand
from lachesis.rollouts.agent.proxy import AgentProxy
from lachesis.rollouts.agent.session import Recorder
from lachesis.rollouts.agent.source import AgentRollouts, AgentSource
from lachesis.rollouts.atropos.convert import Conversion
from lachesis.rollouts.atropos.source import build_atropos_source, keep_given_advantages
from lachesis.rollouts.base import GroupwiseSource
from lachesis.rollouts.custom import ROLLOUTS, CustomSource
from lachesis.rollouts.datasets import Dataset, PromptStream, keep_matching, load_problems, ranks, split_eval
from lachesis.rollouts.datasets.transforms import axolotl_names
from lachesis.rollouts.episodes import EpisodeEvaluator, EpisodeSource, PolicyAccess, TaskPlayers
from lachesis.rollouts.evaluate import Evaluates, Evaluator, ScheduledEvaluation
from lachesis.rollouts.gathered import GatheredCalls
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder, load_rewards
from lachesis.rollouts.streaming import StreamingSource
from lachesis.rollouts.tools import Toolbox, load_parser, load_tools
from lachesis.rollouts.tools.source import ToolSource, ToolTurns, TurnLimits
from lachesis.rollouts.tools.template import Continuation
from lachesis.rollouts.verifiers.build import verifiers_players
from lachesis.train.batch import Batch, pack_for_ranks
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
    load_tokenizer,
)
from lachesis.train.optim.sharded import build_sharded_optimizer
from lachesis.train.policy import Policy

# Calls of an engine with servers of its own, which takes many at once.
_CALLS = 16


def set_up(config: LachesisConfig) -> None:
    """Call ``run.setup``, which may make the model."""
    if config.run.setup is not None:
        load_function(config.run.setup)(config.model.path)


def load_data(config: LachesisConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Problems to train on, none where environments have their own, and those held out.

    Raises:
        ConfigError: the model's context has no room for a prompt and a completion, or a transform is none.
        DataError: as :func:`load_problems`, or nothing would remain to train on.
    """
    trains = config.source.kind in ("local", "agent")  # environments have problems of their own
    if not trains and not config.data.evaluates:
        return [], []
    room = context_length(config.model) - config.sampling.max_completion_length
    if room < 1:
        raise ConfigError(
            f"sampling.max_completion_length is {config.sampling.max_completion_length} and the model's context "
            f"{context_length(config.model)} tokens: no prompt fits",
            remedy="lower sampling.max_completion_length",
        )
    data = config.data
    path = data.path or data.eval_path
    assert path is not None, "config.load and config.rules demand one"
    load = partial(
        load_problems,
        tokenizer=load_tokenizer(config.model),
        system_prompt=data.system_prompt,
        conversations=data.conversations,
        max_prompt_length=min(room, data.max_prompt_length or room),
        overlong=data.overlong_prompts,
        prepared_path=data.prepared_path,
        processes=data.processes,
        transform_config=axolotl_names(config),
    )
    tools = load_tools(config.source.tools) if isinstance(config.source, schema.LocalSourceConfig) else []
    told = {"tools": [dict(tool.schema) for tool in tools]} if tools else {}
    load = partial(load, chat_template_kwargs=data.chat_template_kwargs | told)
    first = Dataset(path, data.name, data.split, data.format, data.transform, data.prompt_column)
    apart = data.eval_path is not None or data.eval_split is not None
    problems: list[Prompt] = []
    if trains or not apart:
        problems = load(first, more=[Dataset(**one.model_dump()) for one in data.more])
        problems = keep_matching(problems, data.filter) if data.filter else problems
    if not apart:
        problems, held_out = split_eval(problems, data.eval_size, seed=config.run.seed)
    else:
        held_out = load(replace(first, path=data.eval_path or path, split=data.eval_split or "train"))
    return problems if trains else [], held_out


def build_reward_functions(config: LachesisConfig) -> list[NamedReward]:
    """The reward functions and models, by name."""
    rewards = config.rewards
    if rewards.sandbox != "auto":  # which is what holds where nothing else is said, here or in the environment
        use_sandbox(rewards.sandbox)
    return load_rewards(
        rewards.functions,
        num_workers=rewards.num_workers,
        model_device=rewards.model_device,
        model_batch_size=rewards.model_batch_size,
    )


def build_rewarder(config: LachesisConfig) -> Rewarder:
    """The reward functions with their weights."""
    return Rewarder(
        build_reward_functions(config),
        weights=config.rewards.weights,
        timeout_s=config.rewards.timeout_s,
        on_error=config.rewards.on_error,
        num_workers=config.rewards.num_workers,
        max_steps=config.run.steps or 0,
        text_completions=config.rewards.text_completions,
    )


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
    loaded = load_model(config.model, config.adapter, weights=weights, on_cpu=strategy.sharded)
    return policy_of(loaded, config, strategy=strategy, make=make)


def policy_of(
    loaded: LoadedModel, config: LachesisConfig, *, strategy: Strategy, make: Callable[..., Policy] = Policy
) -> Policy:
    """Make a loaded model learn; arguments as :func:`build_policy`."""
    length, loss = config.sampling.max_completion_length, config.algorithm.loss
    policy = make(
        loaded,
        strategy=strategy,
        optimizer_builder=partial(
            build_sharded_optimizer,
            config=config.optimizer,
            strategy=strategy,
            learning_rate=learning_rate(config),
            total_steps=total_steps(config),
        ),
        options=config.algorithm,
        max_completion_length=length,
        packing=config.model.packing,
        compile_layers=compiles(config, device=strategy.device(loaded.transformer)),
        custom_loss=load_custom_loss(loss, max_completion_length=length) if loss else None,
    )
    policy.pack = partial(pack_batch, config=config, policy=policy)
    return policy


def compiles(config: LachesisConfig, *, device: torch.device) -> bool:
    """Whether decoder layers are compiled, for a model that computes on ``device``."""
    return config.model.compile == "on" or (config.model.compile == "auto" and device.type == "cuda")


def build_atropos_feed(
    config: LachesisConfig, *, policy: Policy, run_dir: Path, watch: Watch, reachable: bool
) -> Feed[Batch]:
    """The way from a rollout API to packed batches, each as large as the API makes them.

    Args:
        watch: called while a batch is waited for; raises where that has become useless.
        reachable: whether the API has to answer by now.

    Raises:
        EngineError: the API does not answer.
    """
    assert isinstance(config.source, schema.AtroposSourceConfig)
    source = build_atropos_source(
        config,
        conversion=Conversion(
            decode=text_decoder(policy.loaded.tokenizer),
            vocab_size=policy.transformer.config.get_text_config().vocab_size,
            max_length=context_length(config.model),
            eos_token_ids=frozenset(eos_token_ids(policy.loaded)),
        ),
        checkpoint_dir=str(run_dir / "checkpoints"),
        watch=watch,
        reachable=reachable,
    )
    pack_groups = partial(pack_batch, config=config, policy=policy)
    feed = SynchronousFeed(
        collector=WholeBatches(source, count=prompts_per_generation(config)),
        finisher=Finisher(
            advantages=keep_given_advantages(advantage_assigner(config)),
            pack=pack_groups if config.batch.steps_per_generation == 1 else undivided,
            replay=build_replay(config),
        ),
        batch_deadline_s=max(config.deadlines.batch_s, config.source.wait_s),
    )
    return repeated(feed, config, pack=pack_groups, score=policy.recompute_logprobs)


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


def build_feed(
    config: LachesisConfig, *, problems: Sequence[Prompt], policy: Policy, engine: Engine, rewarder: Rewarder
) -> Feed[Batch]:
    """The way from problems to packed batches."""
    source = build_source(config, problems=problems, policy=policy, engine=engine, rewarder=rewarder)
    return feed_from(source, config, policy=policy)


def build_episodes(
    config: LachesisConfig, *, policy: Policy, engine: Engine
) -> tuple[EpisodeSource, EpisodeEvaluator | None]:
    """The environment of ``source`` over the run's engine, and the evaluation on its held-out tasks, if any.

    Raises:
        DependencyError: its library is not installed.
        ConfigError, DataError: it cannot be loaded, or has no tasks.
    """
    source = config.source
    assert isinstance(source, schema.EpisodesSection)
    # What shares the trainer's process does one call after the other.
    at_once = 1 if config.engine.place == "trainer" else _CALLS
    access = PolicyAccess(
        calls=GatheredCalls(engine, at_once=at_once),
        tokenizer=policy.loaded.tokenizer,
        model=config.model.path,
        params=config.sampling.params(),
        max_context=context_length(config.model),
        vocab_size=policy.transformer.config.get_text_config().vocab_size,
    )
    players = build_players(source, access)
    training, held_out = players.split()
    episodes = EpisodeSource(
        stream=PromptStream(training, seed=config.run.seed, shuffle=config.data.shuffle),
        players=players,
        num_generations=config.sampling.num_generations,
        max_concurrent=source.max_concurrent,
        refill_rounds=source.refill_rounds,
        rollout_s=source.rollout_s,
        seed=config.run.seed,
        generation_s=config.deadlines.generation_s,
    )
    evaluator = EpisodeEvaluator(
        source=episodes,
        prompts=held_out[: config.evaluation.max_problems],
        success_reward=config.evaluation.success_reward,
        seed=config.run.seed,
        generation_s=config.deadlines.generation_s,
    )
    return episodes, evaluator if held_out else None


def build_players(source: schema.EpisodesSection, access: PolicyAccess) -> TaskPlayers:
    """The players of an environment that has tasks of its own."""
    assert isinstance(source, schema.VerifiersSourceConfig)
    return verifiers_players(
        access,
        environment=source.environment,
        args=source.args,
        renderer=source.renderer,
        max_tasks=source.max_tasks,
        eval_tasks=source.eval_tasks,
    )


def feed_from(source: GroupwiseSource, config: LachesisConfig, *, policy: Policy) -> Feed[Batch]:
    """The way from the groups of a source to packed batches."""
    pipeline = config.pipeline
    pack_groups = partial(pack_batch, config=config, policy=policy)
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
        )
    return repeated(feed, config, pack=pack_groups, score=policy.recompute_logprobs)


def generated_ahead(config: LachesisConfig) -> int:
    """Batches that are generated while others are trained on."""
    if not config.pipeline.async_prefetch:
        return 0
    return batches_ahead(
        every_steps=getattr(config.bridge, "every_steps", 1),
        depth=config.pipeline.prefetch_depth,
        iterations=steps_per_batch(config),
        max_staleness=config.pipeline.max_staleness,
    )


def build_source(
    config: LachesisConfig, *, problems: Sequence[Prompt], policy: Policy, engine: Engine, rewarder: Rewarder
) -> GroupwiseSource:
    """Prompts of a dataset, and completions by the engine or by a function of the user."""
    common: dict[str, Any] = {
        "stream": build_stream(config, problems),
        "engine": engine,
        "rewarder": rewarder,
        "decode": text_decoder(policy.loaded.tokenizer),
        "params": _sampling_params(config, policy),
        "num_generations": config.sampling.num_generations,
        "seed": config.run.seed,
        "generation_s": config.deadlines.generation_s,
    }
    if isinstance(config.source, schema.AgentSourceConfig):
        return AgentSource(rollouts=build_agents(config, policy=policy, engine=engine), **common)
    assert isinstance(config.source, schema.LocalSourceConfig)
    if config.source.tools:
        return ToolSource(turns=build_turns(config, policy=policy, engine=engine), **common)
    streaming = config.pipeline.streaming
    if config.source.rollout_func is None and (streaming or generated_ahead(config)):
        return StreamingSource(min_groups=config.pipeline.streaming_min_groups if streaming else 1, **common)
    if config.source.rollout_func is None:
        return LocalSource(**common)
    rollouts = load_part(config.source.rollout_func, ROLLOUTS)
    return CustomSource(
        rollout_func=update_wrapper(partial(rollouts.function, **rollouts.kwargs), rollouts.function),
        name=rollouts.spec,
        tokenizer=policy.loaded.tokenizer,
        eos_token_ids=eos_token_ids(policy.loaded),
        vocab_size=policy.transformer.config.get_text_config().vocab_size,
        **common,
    )


def _sampling_params(config: LachesisConfig, policy: Policy) -> SamplingParams:
    """With an end token of the configuration's own, which an engine on a server does not know."""
    params = config.sampling.params()
    token = config.model.special_tokens.get("eos_token")
    if token is None or isinstance(config.engine, schema.EmbeddedEngineConfig):
        return params
    ends = dict.fromkeys((*params.stop_token_ids, policy.loaded.tokenizer.convert_tokens_to_ids(token)))
    return replace(params, stop_token_ids=tuple(ends))


def build_player(config: LachesisConfig, *, policy: Policy, engine: Engine) -> ToolTurns | AgentRollouts | None:
    """Who plays completions of several turns; nobody where they are of one."""
    if isinstance(config.source, schema.AgentSourceConfig):
        return build_agents(config, policy=policy, engine=engine)
    has_tools = isinstance(config.source, schema.LocalSourceConfig) and config.source.tools
    return build_turns(config, policy=policy, engine=engine) if has_tools else None


def build_agents(config: LachesisConfig, *, policy: Policy, engine: Engine) -> AgentRollouts:
    """Agents and their proxy, which begins to listen with the first rollout.

    Raises:
        ConfigError: the command or its directory is not there, or the model has no chat template.
    """
    source, tokenizer = config.source, policy.loaded.tokenizer
    assert isinstance(source, schema.AgentSourceConfig)
    if not tokenizer.chat_template and "chat_template" not in config.data.chat_template_kwargs:
        raise ConfigError(
            "agents send conversations, and the model has no chat template", remedy="set model.chat_template"
        )
    recorder = Recorder(
        tokenizer,
        parse=load_parser(source.tool_parser),
        template_kwargs=config.data.chat_template_kwargs,
        max_context=context_length(config.model),
    )
    # What shares the trainer's process does one call after the other.
    at_once = 1 if config.engine.place == "trainer" else source.max_concurrent
    workdir = None if source.workdir is None else Path(source.workdir)
    return AgentRollouts(
        agent=AgentCommand(tuple(source.command), workdir, source.env, source.timeout_s),
        proxy=AgentProxy(lambda: GatheredCalls(engine, at_once=at_once), recorder, host=source.host),
        decode=text_decoder(tokenizer),
        max_concurrent=source.max_concurrent,
        retries=source.retries,
        score_nonzero=source.nonzero_exit == "score",
    )


def build_turns(config: LachesisConfig, *, policy: Policy, engine: Engine) -> ToolTurns:
    """The turns of rollouts with the tools of the configuration."""
    source, tokenizer = config.source, policy.loaded.tokenizer
    assert isinstance(source, schema.LocalSourceConfig)
    toolbox = Toolbox(load_tools(source.tools), timeout_s=source.tool_timeout_s)
    kwargs = config.data.chat_template_kwargs | {"tools": toolbox.schemas}
    return ToolTurns(
        engine=engine,
        toolbox=toolbox,
        parse=load_parser(source.tool_parser),
        continuation=Continuation(tokenizer, kwargs),
        tokenizer=tokenizer,
        decode=text_decoder(tokenizer),
        limits=TurnLimits(source.max_turns, source.tool_result_tokens, source.rollout_timeout_s),
    )


def build_stream(config: LachesisConfig, problems: Sequence[Prompt]) -> PromptStream:
    """The order in which training meets the problems. Raises DataError where a curriculum has no such column."""
    data = config.data
    return PromptStream(
        problems,
        seed=config.run.seed,
        shuffle=data.shuffle,
        ranks=None if data.order is None else ranks(problems, data.order, data.order_values),
        ranked_epochs=data.order_epochs,
    )


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
            decode=text_decoder(policy.loaded.tokenizer),
            params=replace(_sampling_params(config, policy), temperature=config.evaluation.temperature),
            samples=config.evaluation.samples_per_problem,
            success_reward=config.evaluation.success_reward,
            limit=config.evaluation.max_problems,
            seed=config.run.seed,
            generation_s=config.deadlines.generation_s,
            turns=build_player(config, policy=policy, engine=engine),
            keep=keep,
        )
    return ScheduledEvaluation(evaluator, every_steps=config.evaluation.every_steps, last_step=total_steps(config))


def pack_batch(groups: Sequence[Group], *, config: LachesisConfig, policy: Policy) -> Batch:
    """Pack as the batch section says; sequences are left out only where that changes nothing."""
    algorithm = config.algorithm
    return pack_for_ranks(
        groups,
        ranks=policy.strategy.world_size,
        max_tokens=config.batch.max_tokens_per_microbatch,
        max_rows=config.batch.micro_batch_size,
        skip_zero_advantage=algorithm.skip_zero_advantage and policy.ignores_zero_advantage,
        mask_truncated=algorithm.mask_truncated,
        share_prefixes=policy.plan.packed,
        old_logprobs="trainer" if algorithm.sampler_correction != "none" else "sampler",
        replayed_old_logprobs="trainer" if config.pipeline.replay_recompute_logps else "sampler",
    )
