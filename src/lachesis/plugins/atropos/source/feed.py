"""Feed from a rollout API to the batches of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import prompts_per_generation
from lachesis.engines.base import Engine
from lachesis.pipeline.collect import WholeBatches
from lachesis.pipeline.feed import Feed, Finisher, SynchronousFeed
from lachesis.plugins.atropos.section import AtroposSourceConfig
from lachesis.plugins.atropos.source.convert import Conversion
from lachesis.plugins.atropos.source.source import EngineWatch, build_atropos_source, keep_given_advantages
from lachesis.process.threads import Watch
from lachesis.rollouts.generation import text_decoder
from lachesis.run.feeds import Teach, advantage_assigner, build_replay, repeated, signal_function
from lachesis.train.batch import Batch
from lachesis.train.iterations import undivided
from lachesis.train.model.loading import context_length, eos_token_ids
from lachesis.train.pack import pack_batch
from lachesis.train.policy import Policy


def build_feed(
    config: LachesisConfig,
    *,
    policy: Policy,
    engine: Engine,
    run_dir: Path,
    watch: Callable[[Watch], None],
    reachable: bool,
    teach: Teach = list,
) -> Feed[Batch]:
    """Build the feed from a rollout API to packed batches, each as large as the API makes them.

    Args:
        config: of the run.
        policy: the trained model.
        engine: watched while a batch is awaited.
        run_dir: the run directory.
        watch: called while a batch is awaited, with a check of the engine; raises if waiting has become useless.
        reachable: True if the API has to answer by now.
        teach: adds the logprobs of a teacher outside the trainer to groups.

    Raises:
        EngineError: the API does not answer.
    """
    assert isinstance(config.source, AtroposSourceConfig)
    teacher = config.algorithm.teacher
    source = build_atropos_source(
        config,
        conversion=Conversion(
            decode=text_decoder(policy.loaded.tokenizer),
            vocab_size=policy.transformer.config.get_text_config().vocab_size,
            max_length=context_length(config.model),
            eos_token_ids=frozenset(eos_token_ids(policy.loaded)),
            teacher=teacher if teacher is not None and teacher.kind == "rollouts" else None,
        ),
        checkpoint_dir=str(run_dir / "checkpoints"),
        watch=partial(watch, EngineWatch(engine)),
        reachable=reachable,
    )
    pack_groups = partial(pack_batch, config=config, policy=policy)
    feed = SynchronousFeed(
        collector=WholeBatches(source, count=prompts_per_generation(config)),
        finisher=Finisher(
            advantages=keep_given_advantages(advantage_assigner(config, policy=policy)),
            pack=pack_groups if config.batch.steps_per_generation == 1 else undivided,
            teach=teach,
            replay=build_replay(config, signal_function(config)),
        ),
        batch_deadline_s=max(config.deadlines.batch_s, config.source.wait_s),
    )
    return repeated(feed, config, pack=pack_groups, score=policy.recompute_logprobs)
