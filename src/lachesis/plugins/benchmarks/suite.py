"""Evaluation of an engine's current weights on several benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lachesis.common.run_files import run_paths
from lachesis.common.types import EvalResult, Group, SamplingParams
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.plugins.benchmarks.results import RESULTS, Score, gains, read_results, write_results
from lachesis.plugins.benchmarks.section import BenchmarkConfig
from lachesis.plugins.benchmarks.table import benchmarks, dataset_of, problems_of
from lachesis.rollouts.evaluate import Evaluator
from lachesis.rollouts.generation import reward_decoder
from lachesis.rollouts.rewards.rewarder import Rewarder, load_rewards
from lachesis.run.sources import sampling_params
from lachesis.train.model.loading import context_length
from lachesis.train.policy import Policy


@dataclass(eq=False)
class Suite:
    """Benchmarks with the engine and settings of their evaluation.

    Args:
        asked: the benchmarks, each once.
        params: sampling parameters; a benchmark's own ``max_tokens`` takes precedence.
        samples: completions of each problem, unless a benchmark sets another number.
        context: tokens of the model's context.
        written: called with each result, which is otherwise not kept.
        first: returns the result of an earlier step, from which gains are measured.

    Raises:
        DataError, ConfigError: a benchmark's data is missing.
    """

    asked: Sequence[BenchmarkConfig]
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    context: int
    samples: int = 1
    seed: int = 0
    generation_s: float | None = None
    written: Callable[[int, Mapping[str, Score]], None] = lambda step, scores: None
    first: Callable[[int], Mapping[str, Score]] = lambda step: {}
    _closing: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self._groups: Sequence[Group] = ()
        self._evaluators = {one.name: self._evaluator(one) for one in self.asked}

    def _evaluator(self, asked: BenchmarkConfig) -> Evaluator:
        most = asked.max_tokens or self.params.max_tokens
        functions = load_rewards([benchmarks()[asked.name].reward], num_workers=None)
        rewarder = Rewarder(functions, num_workers=None)
        self._closing.callback(rewarder.close)
        return Evaluator(
            problems=problems_of(asked, tokenizer=self.tokenizer, room=self.context - most),
            engine=self.engine,
            rewarder=rewarder,
            decode=reward_decoder(self.tokenizer, "remove"),
            params=replace(self.params, max_tokens=most),
            samples=asked.samples or self.samples,
            seed=self.seed,
            generation_s=self.generation_s,
            keep=self._keep,
        )

    def _keep(self, step: int, groups: Sequence[Group]) -> None:
        self._groups = groups

    def scores(self, step: int) -> dict[str, Score]:
        """Evaluate all benchmarks. Raises as :meth:`Evaluator.run`."""
        found: dict[str, Score] = {}
        for asked in self.asked:
            evaluator, place = self._evaluators[asked.name], dataset_of(asked)
            evaluator.run(step)
            source = f"{Path(place.path).name if asked.path else place.path}:{place.split}"
            found[asked.name] = Score.of(self._groups, source=source, samples=evaluator.samples)
        self.written(step, found)
        return found

    def run(self, step: int) -> EvalResult:
        """Return the scores of all benchmarks; the result's own figures are over all their problems."""
        started = time.monotonic()
        found = self.scores(step)
        every = [mean for score in found.values() for mean in score.means]
        lengths = [score.mean_length for score in found.values() for _ in score.means]
        gained = gains(found, self.first(step))
        return EvalResult(
            step=step,
            accuracy=sum(every) / len(every),
            mean_reward=sum(every) / len(every),
            problems=len(every),
            mean_length=sum(lengths) / len(lengths),
            seconds=time.monotonic() - started,
            benchmarks={name: score.values() | gained.get(name, {}) for name, score in found.items()},
        )

    def close(self) -> None:
        """End the processes of reward functions. Idempotent."""
        self._closing.close()


def build_suite(config: LachesisConfig, *, policy: Policy, engine: Engine) -> Suite:
    """Return the benchmarks of a run, whose results go to RUN/evaluations/benchmarks/step_N."""
    directory = run_paths(config.run.directory)["evaluations"] / "benchmarks"

    def written(step: int, scores: Mapping[str, Score]) -> None:
        write_results(directory / f"step_{step:06d}", scores, model=f"{config.run.directory} at step {step}")

    def first(step: int) -> Mapping[str, Score]:
        earliest = min(directory.glob(f"step_*/{RESULTS}"))
        return {} if earliest.parent.name == f"step_{step:06d}" else read_results(earliest.parent)

    params = sampling_params(config, policy)
    return Suite(
        asked=[BenchmarkConfig(name=one) if isinstance(one, str) else one for one in config.evaluation.benchmarks],
        engine=engine,
        tokenizer=policy.tokenizer,
        params=replace(params, temperature=config.evaluation.temperature, routed_experts=False),
        context=context_length(config.model),
        samples=config.evaluation.samples_per_problem,
        seed=config.run.seed,
        generation_s=config.deadlines.generation_s,
        written=written,
        first=first,
    )
