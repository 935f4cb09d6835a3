"""The source of a run from its section, for whichever line of verifiers is installed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.common.errors import DependencyError, first_line
from lachesis.config.schema import LachesisConfig, VerifiersSourceConfig
from lachesis.engines.base import Engine
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeEvaluator, EpisodeSource
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.turns import TurnServer
from lachesis.rollouts.verifiers.settings import NEEDS, Environment, VerifiersSettings, installed_line, own_signals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Calls of an engine with servers of its own, which takes many at once.
_CALLS = 16


def build_verifiers_source(
    config: LachesisConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    max_context: int,
    vocab_size: int,
) -> tuple[EpisodeSource, EpisodeEvaluator | None]:
    """The environment of ``source`` over the run's engine, and the evaluation on its held-out tasks, if any.

    Raises:
        DependencyError: verifiers is not installed.
        ConfigError, DataError: the environment cannot be loaded, or has no tasks.
    """
    source = config.source
    assert isinstance(source, VerifiersSourceConfig)
    params = config.sampling.params()
    directory = tempfile.TemporaryDirectory(prefix="lachesis-tokenizer-")
    tokenizer.save_pretrained(directory.name)
    in_process = config.engine.place == "trainer"
    settings = VerifiersSettings(
        environment=source.environment,
        args=source.args,
        server=TurnServer(
            engine, params=params, max_context=max_context, vocab_size=vocab_size, at_once=1 if in_process else _CALLS
        ),
        tokenizer=Path(directory.name),
        model=config.model.path,
        renderer=source.renderer,
        params=params,
        decode=text_decoder(tokenizer),
        max_tasks=source.max_tasks,
        eval_tasks=source.eval_tasks,
    )
    with own_signals():
        environment = load_players()(settings)
    environment.keep = directory
    training, held_out = environment.split()
    episodes = EpisodeSource(
        stream=PromptStream(training, seed=config.run.seed, shuffle=config.data.shuffle),
        players=environment,
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


def load_players() -> Callable[[VerifiersSettings], Environment]:
    """The players of the line that is installed. Raises DependencyError where none is, or not whole."""
    line = installed_line()
    try:
        if line == "0.1":
            from lachesis.rollouts.verifiers.line01 import EnvironmentPlayers

            return EnvironmentPlayers
        from lachesis.rollouts.verifiers.today import TodaysPlayers

        return TodaysPlayers
    except ImportError as error:
        raise DependencyError(f"verifiers cannot be imported: {first_line(error)}", remedy=NEEDS) from error
