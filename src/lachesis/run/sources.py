"""The sources of a run's rollouts, built from its sections: data, rewards and rollout players."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lachesis.common.contracts import load_part
from lachesis.common.errors import ConfigError, DataError
from lachesis.common.imports import names_module
from lachesis.common.types import Finding, Prompt, SamplingParams
from lachesis.config import schema
from lachesis.config.schema import LachesisConfig, TeacherConfig
from lachesis.config.schema.training import placeholders
from lachesis.config.steps import batches_ahead, steps_per_batch
from lachesis.engines.base import Engine
from lachesis.plugins import load
from lachesis.rollouts.base import GroupwiseSource
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import Dataset, PassRates, PromptStream, keep_matching, load_problems, ranks, split_eval
from lachesis.rollouts.datasets.transforms import axolotl_names
from lachesis.rollouts.episodes import (
    SOURCE,
    EpisodeEvaluator,
    Episodes,
    EpisodeSource,
    Players,
    PolicyAccess,
    TaskPlayers,
)
from lachesis.rollouts.generation import removed_special_tokens, reward_decoder
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder, load_rewards
from lachesis.rollouts.streaming import StreamingSource
from lachesis.rollouts.tools import Toolbox, load_parser, load_tools, tool_schemas
from lachesis.rollouts.tools.template import Continuation
from lachesis.train.model.loading import context_length, eos_token_ids, load_tokenizer, takes_images
from lachesis.train.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lachesis.rollouts.tools.player import ToolPlayers

logger = logging.getLogger(__name__)

# Concurrent calls to an engine on servers, which handles many at once. A call lasts as long as its slowest turn.
_CALLS = 64

# Maximum number of environments to list in a message.
_NAMED = 10

# How long the start of a run waits for imports of reward functions, in seconds, before it continues without them.
_EARLY_S = 1.0


def load_data(config: LachesisConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training problems (none if environments have their own) and the held-out problems.

    Raises:
        ConfigError: the model's context is too short for a prompt and a completion, a transform is invalid, or an
            environment in ``algorithm.teacher`` does not exist.
        DataError: as :func:`load_problems`, or no training problem remains.
    """
    trains = config.source.kind in ("local", "agent")  # environments have their own problems
    if not trains and not config.data.evaluates:
        return [], []
    load, data = _loader(config), config.data
    path = data.path or data.eval_path
    assert path is not None, "config.load and config.rules demand one"
    first = Dataset(path, data.name, data.split, data.format, data.transform, data.prompt_column)
    apart = data.eval_path is not None or data.eval_split is not None
    problems: list[Prompt] = []
    if trains or not apart:
        problems = load(first, more=[Dataset(**one.model_dump()) for one in data.more])
        problems = keep_matching(problems, data.filter) if data.filter else problems
        check_environments(problems, config.algorithm.teacher)
    if not apart:
        problems, held_out = split_eval(problems, data.eval_size, seed=config.run.seed)
    else:
        held_out = load(replace(first, path=data.eval_path or path, split=data.eval_split or "train"))
    return problems if trains else [], held_out


def check_environments(problems: Sequence[Prompt], options: TeacherConfig | None) -> None:
    """Check that the problems come from the environments that have teacher weights.

    A problem without an environment would get the default weight, and a misspelt name would have no effect.

    Raises:
        DataError: a problem does not name its environment.
        ConfigError: an environment that has a weight has no problems.
    """
    if options is None or not problems:
        return
    key = "algorithm.teacher"
    columns = {name for problem in problems for name, value in problem.columns.items() if value not in (None, "")}
    for text in options.prompts:
        if missing := sorted(placeholders(text) - columns - {"prompt", "solution"}):
            raise ConfigError(
                f"{key}.prompts {text!r}: no problem has a value in the column {', '.join(missing)}",
                remedy=f"name a column that has values: {', '.join(sorted(columns)) or 'there is none'}",
            )
    if not (options.weights or options.reward_weights):
        return
    silent = next((problem for problem in problems if problem.columns.get(options.column) is None), None)
    if silent is not None:
        raise DataError(
            f"problem {silent.id} has no value in the column {options.column}, which {key}.column names; it has "
            f"{', '.join(sorted(silent.columns)) or 'no columns'}",
            remedy=f"set {key}.column to the column that names each problem's environment, and fill it in every row",
        )
    there = {str(problem.columns[options.column]) for problem in problems}
    for field, weights in (("weights", options.weights), ("reward_weights", options.reward_weights)):
        for name in weights:
            if name not in there:
                raise ConfigError(
                    f"{key}.{field} names {name}, but no problem has that value in the column {options.column}",
                    remedy=f"use one of {', '.join(sorted(there)[:_NAMED])}{' ...' if len(there) > _NAMED else ''}",
                )


def load_answers(config: LachesisConfig) -> list[Prompt]:
    """Load the problems of ``sft.path``. Raises as :func:`load_data`."""
    assert config.sft.path is not None
    return _loader(config)(Dataset(config.sft.path))


def _loader(config: LachesisConfig) -> Callable[..., list[Prompt]]:
    """Return the function that loads the problems of datasets. Raises as :func:`load_data`."""
    room = context_length(config.model) - config.sampling.max_completion_length
    if room < 1:
        raise ConfigError(
            f"sampling.max_completion_length is {config.sampling.max_completion_length} and the model's context has "
            f"{context_length(config.model)} tokens, which leaves no room for a prompt",
            remedy="lower sampling.max_completion_length",
        )
    data = config.data
    tokenizer = load_tokenizer(config.model)
    read = partial(
        load_problems,
        tokenizer=tokenizer,
        system_prompt=data.system_prompt,
        conversations=makes_conversations(config, has_template=has_chat_template(config, tokenizer)),
        max_prompt_length=min(room, data.max_prompt_length or room),
        overlong=data.overlong_prompts,
        prepared_path=data.prepared_path,
        processes=data.processes,
        transform_config=axolotl_names(config),
        images=load("vision", "reader")(config.model, tokenizer) if takes_images(config.model) else None,
    )
    tools = tool_schemas(config.source.tools) if isinstance(config.source, schema.LocalSourceConfig) else []
    told = {"tools": [dict(tool) for tool in tools]} if tools else {}
    return partial(read, chat_template_kwargs=data.chat_template_kwargs | told)


def reward_workers(config: LachesisConfig) -> int | None:
    """Return how many processes call rewards; None means one if that makes no difference to the functions.

    A function that shares module state with other functions of the configuration, such as tools or a rollout function,
    or that gets environments, which are objects of this process, must stay in this process.
    """
    number = config.rewards.num_workers
    if number is not None:
        return number
    others = [text for text in _texts(config.model_dump(exclude={"rewards", "data"})) if names_module(text)]
    modules = {_module_of(text) for text in others}
    named = [one if isinstance(one, str) else str(one["function"]) for one in config.rewards.functions]
    shared = config.source.kind == "steps" or any(_module_of(one) in modules for one in named)
    return 0 if shared else None


def _module_of(spec: str) -> str:
    """Return the module or file of a function's import path in a canonical form."""
    module = spec.rpartition(":")[0] or spec.rpartition(".")[0]
    return module.removesuffix(".py").rpartition("/")[2].rpartition(".")[2]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def has_chat_template(config: LachesisConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if prompts can be rendered with a chat template."""
    return bool(tokenizer.chat_template or "chat_template" in config.data.chat_template_kwargs)


def makes_conversations(config: LachesisConfig, *, has_template: bool) -> bool:
    """Return True if a text prompt becomes a user message."""
    if config.data.conversations is not None:
        return config.data.conversations
    return has_template and config.rewards.text_completions == "messages"


def template_findings(
    config: LachesisConfig, problems: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[Finding]:
    """Report how text prompts are treated if the tokenizer has a chat template and data.conversations is unset."""
    data = config.data
    if data.conversations is not None or data.system_prompt is not None or not has_chat_template(config, tokenizer):
        return []
    if not any(isinstance(problem.columns.get(data.prompt_column), str) for problem in problems[:1000]):
        return []
    if makes_conversations(config, has_template=True):
        return [
            Finding(
                "note",
                "chat_template",
                "prompts are texts and the tokenizer has a chat template: each is sent as a user's message; to have "
                "the model continue the bare texts, set data.conversations: false",
            )
        ]
    return [
        Finding(
            "warning",
            "chat_template",
            "prompts are texts and the tokenizer has a chat template, which is not applied, because "
            "rewards.text_completions is text; to apply it, set data.conversations: true (reward functions then get "
            "messages), or set it to false to continue the bare texts without this warning",
        )
    ]


def build_reward_functions(config: LachesisConfig) -> list[NamedReward]:
    """Build the reward functions and reward models that the configuration names."""
    rewards = config.rewards
    if rewards.sandbox != "auto":  # the default if neither the configuration nor the environment sets one
        from lachesis.plugins.sandbox.choice import use_sandbox

        use_sandbox(rewards.sandbox)
    return load_rewards(
        rewards.functions,
        num_workers=reward_workers(config),
        model_device=rewards.model_device,
        model_batch_size=rewards.model_batch_size,
    )


def build_rewarder(config: LachesisConfig, *, stop_requested: Callable[[], bool] = lambda: False) -> Rewarder:
    """Build the rewarder from the reward functions and their weights."""
    return Rewarder(
        build_reward_functions(config),
        weights=config.rewards.weights,
        timeout_s=config.rewards.timeout_s,
        on_error=config.rewards.on_error,
        num_workers=reward_workers(config),
        max_steps=config.run.steps or 0,
        text_completions=config.rewards.text_completions,
        stop_requested=stop_requested,
    )


def rewarder_of(
    config: LachesisConfig,
    *,
    problems: Sequence[Prompt],
    held_out: Sequence[Prompt],
    closing: ExitStack,
    stop_requested: Callable[[], bool],
) -> Rewarder | None:
    """Build the scorer of samples; None if environments score their own and nothing else needs scores."""
    environments = config.source.kind not in ("local", "agent")
    judges = isinstance(config.source, schema.EpisodesSourceConfig) and config.rewards.functions
    if environments and not held_out and not judges:
        return None
    rewarder = build_rewarder(config, stop_requested=stop_requested)
    closing.callback(rewarder.close)
    plain = config.source.kind == "local" and not config.source.tools and config.source.rollout_func is None
    columns = {name for problem in problems for name in problem.columns}
    rewarder.check_early(columns if plain else None, within_s=_EARLY_S)
    return rewarder


def build_stream(config: LachesisConfig, problems: Sequence[Prompt]) -> PromptStream:
    """Build the stream of training problems in order. Raise DataError if a curriculum's column is missing."""
    data = config.data
    return PromptStream(
        problems,
        seed=config.run.seed,
        shuffle=data.shuffle,
        ranks=None if data.order is None else ranks(problems, data.order),
        rates=PassRates(config.run.seed, config.evaluation.success_reward) if data.curriculum == "pass_rate" else None,
    )


def build_source(
    config: LachesisConfig, *, problems: Sequence[Prompt], policy: Policy, engine: Engine, rewarder: Rewarder
) -> GroupwiseSource:
    """Build the source of groups from a dataset's prompts, completed by the engine or by the user's function."""
    for words in rewarder.blanks(problems):
        logger.warning("%s", words)
    removed = removed_special_tokens(policy.tokenizer)
    if removed and config.rewards.special_tokens == "remove":
        logger.warning(
            "%s are special tokens of the tokenizer and are removed from the text that rewards see; "
            "set rewards.special_tokens: keep to leave them in",
            ", ".join(removed[:8]),
        )
    shared: dict[str, Any] = {
        "stream": build_stream(config, problems),
        "rewarder": rewarder,
        "num_generations": config.sampling.num_generations,
        "seed": config.run.seed,
        "generation_s": config.deadlines.generation_s,
    }
    params = sampling_params(config, policy)
    ahead = generated_ahead(config) > 0
    if (players := build_players(config, params, policy=policy, engine=engine, rewarder=rewarder)) is not None:
        return EpisodeSource(players=players, together=not ahead, **shared, **_limits(config))
    streaming = config.pipeline.streaming
    options = {
        "engine": engine,
        "params": params,
        "decode": reward_decoder(policy.tokenizer, config.rewards.special_tokens),
    }
    if streaming or ahead:
        return StreamingSource(min_groups=config.pipeline.streaming_min_groups if streaming else 1, **shared, **options)
    return LocalSource(**shared, **options)


def _limits(config: LachesisConfig) -> dict[str, Any]:
    """Return the options of :class:`Episodes` for a source of prompts."""
    source = config.source
    if isinstance(source, schema.AgentSourceConfig):
        return {"max_concurrent": source.max_concurrent, "refill_rounds": source.retries}
    return {}


def call_batcher(config: LachesisConfig, engine: Engine) -> CallBatcher:
    """Return the batcher of single-turn calls; an engine in the trainer's process handles one call at a time."""
    return CallBatcher(engine, at_once=1 if config.engine.place == "trainer" else _CALLS)


def sampling_params(config: LachesisConfig, policy: Policy) -> SamplingParams:
    """Return the sampling parameters, with the configured end token, which a server does not know."""
    params = replace(config.sampling.params(), routed_experts=config.algorithm.router_replay)
    if config.model.sees_images:
        ends = load("images", "placeholders")(policy.transformer.config)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
    token = config.model.special_tokens.get("eos_token")
    if token is None or isinstance(config.engine, schema.EmbeddedEngineConfig):
        return params
    ends = dict.fromkeys((*params.stop_token_ids, policy.loaded.tokenizer.convert_tokens_to_ids(token)))
    return replace(params, stop_token_ids=tuple(ends))


def build_players(
    config: LachesisConfig, params: SamplingParams, *, policy: Policy, engine: Engine, rewarder: Rewarder | None
) -> Players | None:
    """Return the players of a dataset's rollouts; None if rollouts are single-turn completions."""
    source, calls = config.source, call_batcher(config, engine)
    if isinstance(source, schema.AgentSourceConfig):
        judged_by = frozenset[str]() if rewarder is None else rewarder.named_columns
        return load("sources", "agent")(config, policy=policy, calls=calls, params=params, judged_by=judged_by)
    if not isinstance(source, schema.LocalSourceConfig):
        return None
    if source.tools:
        return build_turns(config, params, policy=policy, calls=calls)
    if source.rollout_func is None:
        return None
    return load("sources", "rollout_func")(
        source.rollout_func,
        calls=calls,
        params=params,
        num_generations=config.sampling.num_generations,
        tokenizer=policy.loaded.tokenizer,
        decode=reward_decoder(policy.tokenizer, config.rewards.special_tokens),
        version=lambda: engine.health().version,
        eos_token_ids=eos_token_ids(policy.loaded),
        vocab_size=policy.transformer.config.get_text_config().vocab_size,
        by_group=generated_ahead(config) > 0,
    )


def build_evaluated(
    config: LachesisConfig, params: SamplingParams, *, policy: Policy, engine: Engine, rewarder: Rewarder | None
) -> Episodes | None:
    """Return the episodes for held-out problems; None if these are single-turn, as with a rollout function."""
    if isinstance(config.source, schema.LocalSourceConfig) and not config.source.tools:
        return None
    players = build_players(config, params, policy=policy, engine=engine, rewarder=rewarder)
    return None if players is None else Episodes(players, **_limits(config))


def build_turns(config: LachesisConfig, params: SamplingParams, *, policy: Policy, calls: CallBatcher) -> ToolPlayers:
    """Return the players of rollouts with the configured tools."""
    from lachesis.rollouts.tools.player import ToolPlayers, TurnLimits

    source, tokenizer = config.source, policy.loaded.tokenizer
    assert isinstance(source, schema.LocalSourceConfig)
    images = load("vision", "reader")(config.model, tokenizer) if config.model.sees_images else None
    toolbox = Toolbox(load_tools(source.tools), timeout_s=source.tool_timeout_s, shows_images=images is not None)
    kwargs = config.data.chat_template_kwargs | {"tools": toolbox.schemas}
    return ToolPlayers(
        calls=calls,
        params=params,
        toolbox=toolbox,
        parse=load_parser(source.tool_parser, tokenizer=tokenizer),
        continuation=Continuation(tokenizer, kwargs),
        tokenizer=tokenizer,
        decode=reward_decoder(tokenizer, config.rewards.special_tokens),
        limits=TurnLimits(source.max_turns, source.tool_result_tokens, source.rollout_timeout_s),
        placeholders=frozenset(load("images", "placeholders")(policy.transformer.config)),
        images=images,
    )


def build_episodes(
    config: LachesisConfig, *, policy: Policy, engine: Engine, rewarder: Rewarder | None
) -> tuple[EpisodeSource, EpisodeEvaluator | None]:
    """Build the source of groups from an environment, and the evaluation on its held-out tasks, if any.

    Raises:
        DependencyError: the environment's library is not installed. ConfigError, DataError: the environment cannot be
            loaded, or has no tasks.
    """
    source = config.source
    assert isinstance(source, schema.EpisodesSourceConfig)
    access = PolicyAccess(
        calls=call_batcher(config, engine),
        tokenizer=policy.loaded.tokenizer,
        model=config.model.path,
        params=config.sampling.params(),
        max_context=context_length(config.model),
        vocab_size=policy.transformer.config.get_text_config().vocab_size,
        special_tokens=config.rewards.special_tokens,
    )
    if source.builds:
        players = installed_players(config, access, rewarder)
    else:
        players = load("sources", source.kind)(config, access, rewarder)
    training, held_out = players.split()
    episodes = EpisodeSource(
        stream=build_stream(config, training),
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


def installed_players(config: LachesisConfig, access: PolicyAccess, rewarder: Rewarder | None) -> TaskPlayers:
    """Build the players of an installed package's source.

    Raises:
        ConfigError: they cannot be built, or would not call ``rewards.functions``.
    """
    part = load_part(config.source.builds, SOURCE)
    if rewarder is not None and "rewarder" not in part.arguments:
        raise ConfigError(
            f"rewards.functions do nothing with source.kind {config.source.kind}, which scores its own rollouts",
            remedy="remove them",
        )
    kwargs = config.data.chat_template_kwargs
    return part.make(access, section=config.source, rewarder=rewarder, template_kwargs=kwargs)


def generated_ahead(config: LachesisConfig) -> int:
    """Return the number of batches that are generated ahead of training."""
    if not config.pipeline.async_prefetch:
        return 0
    return batches_ahead(
        every_steps=getattr(config.bridge, "every_steps", 1),
        depth=config.pipeline.prefetch_depth,
        iterations=steps_per_batch(config),
        max_staleness=config.pipeline.max_staleness,
    )
