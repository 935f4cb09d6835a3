"""The feeds of a run: packed batches from the source in the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lachesis.common.contracts import load_part
from lachesis.common.errors import EngineError
from lachesis.common.types import Group, Prompt
from lachesis.config.schema import EpisodesSourceConfig, LachesisConfig
from lachesis.config.single_sources import single_configs
from lachesis.config.steps import prompts_per_generation, total_steps
from lachesis.engines.base import Engine
from lachesis.pipeline.collect import Collector, Reroll
from lachesis.pipeline.feed import Feed, Finisher, SynchronousFeed
from lachesis.pipeline.filters import any_reward_differs, has_signal
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.pipeline.replay import ReplayBuffer
from lachesis.plugins import load
from lachesis.rollouts.base import GroupwiseSource
from lachesis.rollouts.evaluate import Evaluates
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.run.context import EngineSide, RunContext, RunPlace
from lachesis.run.sources import build_episodes, build_source, generated_ahead, load_answers
from lachesis.train.batch import Batch
from lachesis.train.iterations import Pack, RepeatedFeed, undivided
from lachesis.train.losses.advantage import advantage_function, assign_advantages
from lachesis.train.losses.custom_advantage import ADVANTAGE, custom_assigner
from lachesis.train.losses.kl import KlInReward
from lachesis.train.model.loading import context_length, eos_token_ids
from lachesis.train.pack import pack_batch, pack_rollouts
from lachesis.train.policy import Policy
from lachesis.train.sft import StartedFeed, demonstrations

Teach = Callable[[Sequence[Group]], Sequence[Group]]
"""A function that adds a teacher server's logprobs to groups."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The feed of a run, and the evaluator to use instead of held-out problems, if any."""

    feed: Feed[Batch]
    reward_names: Sequence[str]
    evaluator: Evaluates | None = None


def build_rollouts(
    config: LachesisConfig,
    *,
    problems: Sequence[Prompt],
    policy: Policy,
    side: EngineSide,
    rewarder: Rewarder | None,
    teach: Teach,
    place: RunPlace,
    context: RunContext,
) -> Rollouts:
    """Build the feed of packed batches from the source in the configuration."""
    engine = side.bridge.engine
    if config.source.kind == "atropos":
        feed = load("sources", "atropos")(
            config,
            policy=policy,
            engine=engine,
            run_dir=place.directory,
            watch=partial(watch_over, side, context),
            reachable=context.companions is None or not context.companions.starts_api,
            teach=teach,
        )
        return Rollouts(feed, ())
    built = build_groups(config, problems=problems, policy=policy, engine=engine, rewarder=rewarder)
    feed = feed_from(built.source, config, policy=policy, teach=teach)
    return Rollouts(feed, built.reward_names, built.evaluator)


def watch_over(side: EngineSide, context: RunContext, engine: Callable[[], None]) -> None:
    """Raise if no batch can come any more: a stop was requested, or the engine or a companion has died."""
    context.raise_if_stopped()
    if side.owned is None:
        engine()
    elif side.owned.died(within_s=0.0):
        raise EngineError("the engine died while the environments were generating", remedy="read its log")
    if context.companions is not None:
        context.companions.watch()


class GroupsBuilt(NamedTuple):
    """A source of groups, the names of its rewards, and its evaluator instead of held-out problems, if any."""

    source: GroupwiseSource
    reward_names: Sequence[str]
    evaluator: Evaluates | None


def build_groups(
    config: LachesisConfig,
    *,
    problems: Sequence[Prompt],
    policy: Policy,
    engine: Engine,
    rewarder: Rewarder | None,
) -> GroupsBuilt:
    """Build the source of a dataset or of an environment."""
    if isinstance(config.source, EpisodesSourceConfig):
        episodes, evaluator = build_episodes(config, policy=policy, engine=engine, rewarder=rewarder)
        return GroupsBuilt(episodes, episodes.players.reward_names, evaluator)
    assert rewarder is not None, "a dataset is scored by functions"
    source = build_source(config, problems=problems, policy=policy, engine=engine, rewarder=rewarder)
    return GroupsBuilt(source, rewarder.names, None)


def feed_from(
    source: GroupwiseSource,
    config: LachesisConfig,
    *,
    policy: Policy,
    teach: Teach = list,
    advantages: Callable[[Sequence[Group]], list[Group]] | None = None,
    signal: Callable[[Group], bool] | None = None,
) -> Feed[Batch]:
    """Build the feed of packed batches from the groups of a source.

    ``advantages`` and ``signal`` replace :func:`advantage_assigner` and :func:`signal_function`.
    """
    signal = signal or signal_function(config)
    pipeline = config.pipeline
    pack_groups = partial(pack_rollouts, config=config, policy=policy)
    collector = Collector(
        source,
        count=prompts_per_generation(config),
        refill_rounds=pipeline.refill_zero_signal,
        reroll=build_reroll(config),
        signal=signal,
    )
    finisher = Finisher(
        advantages=advantages or advantage_assigner(config, policy=policy),
        pack=pack_groups if config.batch.steps_per_generation == 1 else undivided,
        teach=teach,
        replay=build_replay(config, signal),
    )
    feed: Feed[Batch] = SynchronousFeed(
        collector=collector, finisher=finisher, batch_deadline_s=config.deadlines.batch_s
    )
    if ahead := generated_ahead(config):
        feed = AsynchronousFeed(
            source=source,
            collector=collector,
            finisher=finisher,
            ahead=ahead,
            batch_deadline_s=config.deadlines.batch_s,
            # An engine in the trainer's process handles one call at a time; players take care of that themselves.
            at_once=None if source.queues or config.engine.place != "trainer" else 1,
        )
    return repeated(feed, config, pack=pack_groups, score=policy.recompute_logprobs)


def with_start(feed: Feed[Batch], config: LachesisConfig, *, problems: Sequence[Prompt], policy: Policy) -> Feed[Batch]:
    """Return the feed, preceded by a supervised warm start if ``run.stages`` has one.

    Args:
        problems: the problems with answers, used unless ``sft.path`` names other data.

    Raises:
        DataError: a problem has no answer, or one that is too long.
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


def repeated(
    feed: Feed[Batch], config: LachesisConfig, *, pack: Pack, score: Callable[[Batch], Batch] = lambda batch: batch
) -> Feed[Batch]:
    """Return a feed of the optimizer steps on each batch; checkpoints have one format for one or several steps."""
    return RepeatedFeed(
        feed,
        num_iterations=config.algorithm.num_iterations,
        pack=pack,
        steps_per_generation=config.batch.steps_per_generation,
        seed=config.run.seed,
        score=score,
    )


def build_replay(config: LachesisConfig, signal: Callable[[Group], bool]) -> ReplayBuffer | None:
    size = config.pipeline.replay_size
    return ReplayBuffer(size=size, seed=config.run.seed, signal=signal) if size else None


def advantage_assigner(config: LachesisConfig, *, policy: Policy) -> Callable[[Sequence[Group]], list[Group]]:
    """Return the function that assigns advantages to a step's groups."""
    if config.algorithm.advantage is not None:
        part = load_part(config.algorithm.advantage, ADVANTAGE)
        return custom_assigner(part, options=config.algorithm, weights=config.rewards.weights)
    if config.algorithm.kl_placement != "loss":
        return KlInReward(config.algorithm, config.rewards.weights, policy.divergences, policy.kl_weight)
    compute = advantage_function(config.algorithm, weights=config.rewards.weights)
    return partial(assign_advantages, compute=compute)


def signal_function(config: LachesisConfig) -> Callable[[Group], bool]:
    """Return a function that returns True if a group has a learning signal with the configured advantages."""
    return any_reward_differs if config.algorithm.aggregation == "normalize_then_sum" else has_signal


def build_reroll(config: LachesisConfig) -> Reroll | None:
    """Build the retry of failed prompts, which begins after a share of the run; None if the share is all of it."""
    start = config.pipeline.reroll_start_fraction
    if start >= 1:
        return None
    return Reroll(start_step=math.ceil(total_steps(config) * start), max_groups=config.pipeline.reroll_max_groups)


def build_teach(config: LachesisConfig, *, tokenizer: PreTrainedTokenizerBase, closing: ExitStack) -> Teach:
    """Return a function that adds a server teacher's logprobs or a self-teacher's prompts; else one that does nothing.

    Raises:
        ModelError: the teacher has another tokenizer.
        EngineError, DeadlineExceeded: the teacher does not answer.
    """
    if config.algorithm.teachers:
        return _teach_by_source(
            {
                name: build_teach(one, tokenizer=tokenizer, closing=closing)
                for name, one in single_configs(config).items()
            }
        )
    options = config.algorithm.teacher
    if options is None or options.kind not in ("url", "self"):
        return list
    return load("teachers", options.kind)(config, tokenizer=tokenizer, closing=closing)


def _teach_by_source(each: Mapping[str, Teach]) -> Teach:
    """Return a function that passes each group to the teacher of its source."""

    def teach(groups: Sequence[Group]) -> Sequence[Group]:
        done: dict[int, Group] = {}
        for name, of_source in each.items():
            places = [place for place, group in enumerate(groups) if group.prompt.source == name]
            done |= zip(places, of_source([groups[place] for place in places]), strict=True)
        return [done[place] for place in range(len(groups))]

    return teach
