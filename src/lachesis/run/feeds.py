"""Where a run's batches come from: the way from the source that its configuration names to packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lachesis.common.errors import EngineError
from lachesis.common.types import Prompt
from lachesis.config.schema import EpisodesSourceConfig, LachesisConfig
from lachesis.pipeline.feed import Feed
from lachesis.plugins import load
from lachesis.rollouts.evaluate import Evaluates
from lachesis.rollouts.partial_rollouts import KeptRollouts
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.run.context import EngineSide, RunContext, RunPlace
from lachesis.run.parts import build_feed, feed_from
from lachesis.run.sources import build_episodes
from lachesis.run.teacher import Teach
from lachesis.train.batch import Batch
from lachesis.train.policy import Policy

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Where a run's batches come from, what evaluates in place of the held-out problems, and what is kept of them."""

    feed: Feed[Batch]
    reward_names: Sequence[str]
    kept: KeptRollouts | None
    evaluator: Evaluates | None = None


def build_rollouts(
    config: LachesisConfig,
    *,
    problems: Sequence[Prompt],
    policy: Policy,
    side: EngineSide,
    rewarder: Rewarder | None,
    kept: KeptRollouts | None,
    teach: Teach,
    place: RunPlace,
    context: RunContext,
) -> Rollouts:
    """The way from the source that the configuration names to packed batches."""
    engine = side.bridge.engine
    if isinstance(config.source, EpisodesSourceConfig):
        episodes, evaluator = build_episodes(config, policy=policy, engine=engine, rewarder=rewarder)
        feed = feed_from(episodes, config, policy=policy, kept=kept, teach=teach)
        return Rollouts(feed, episodes.players.reward_names, kept, evaluator)
    if config.source.kind == "atropos" or rewarder is None:
        feed = load("sources", "atropos")(
            config,
            policy=policy,
            engine=engine,
            run_dir=place.directory,
            watch=partial(watch_over, side, context),
            stop=context.raise_if_stopped,
            reachable=context.companions is None or not context.companions.starts_api,
            teach=teach,
        )
        return Rollouts(feed, (), kept)
    feed = build_feed(
        config, problems=problems, policy=policy, engine=engine, rewarder=rewarder, kept=kept, teach=teach
    )
    return Rollouts(feed, rewarder.names, kept)


def watch_over(side: EngineSide, context: RunContext, engine: Callable[[], None]) -> None:
    """Raise if waiting for a batch is in vain: the run is to stop, or the engine or a companion has died."""
    context.raise_if_stopped()
    if side.owned is None:
        engine()
    elif side.owned.died(within_s=0.0):
        raise EngineError("the engine died while the environments were generating", remedy="read its log")
    if context.companions is not None:
        context.companions.watch()
