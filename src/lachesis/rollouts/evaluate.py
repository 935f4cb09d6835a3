"""Accuracy on held-out problems."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError, RewardError
from lachesis.common.types import EvalResult, Group, Prompt, SamplingParams
from lachesis.engines.base import Engine
from lachesis.rollouts.episodes import Episodes, item_of
from lachesis.rollouts.failures import note_excluded
from lachesis.rollouts.generation import TextDecoder, generate_groups, request_seed
from lachesis.rollouts.rewards.attempts import Item
from lachesis.rollouts.rewards.rewarder import Rewarder


@dataclass(kw_only=True)
class Evaluator:
    """Evaluator that samples completions of every held-out problem (one, greedily, by ``params``) and scores them.

    Evaluations of one run use the same seeds each time, so they can be compared where they sample.

    Args:
        samples: completions of each problem.
        success_reward: a completion with at least this total reward is a success.
        generation_s: limit of generating all completions of one evaluation, in seconds.
        episodes: plays the completions if they have several turns.
        keep: called with the step and the scored groups of each evaluation.

    Raises:
        DataError: there are no problems.
        RewardError: a reward function needs a column that the problems do not have.
    """

    problems: Sequence[Prompt]
    engine: Engine
    rewarder: Rewarder
    decode: TextDecoder
    params: SamplingParams
    samples: int = 1
    success_reward: float = 1.0
    limit: int | None = None
    seed: int = 0
    generation_s: float | None = None
    episodes: Episodes | None = None
    keep: Callable[[int, Sequence[Group]], None] | None = None

    def __post_init__(self) -> None:
        self.problems = self.problems[: self.limit]
        if not self.problems:
            raise DataError(
                "there are no held-out problems to evaluate on", remedy="set data.eval_path or data.eval_size"
            )
        own = (self.episodes and self.episodes.players.columns) or ()
        self.rewarder.check_columns({*own, *(name for problem in self.problems for name in problem.columns)})

    def run(self, step: int) -> EvalResult:
        """Evaluate the engine's current weights.

        A completion on which all reward functions abstain is not a success: it counts in the denominator of
        ``accuracy``, and not at all in ``mean_reward``. One that could not be judged (its sandbox died) says nothing
        about the weights: it is noted, and left out of both.

        Raises:
            RewardError: a reward function failed (an accuracy over the rest would be wrong), all abstained
                on every problem, or no completion could be judged.
            EngineError, DeadlineExceeded: generation failed.
        """
        started = time.monotonic()
        deadline = Deadline(
            f"evaluation at step {step}: generation for {len(self.problems)} problems",
            self.generation_s,
            "deadlines.generation_s",
        )
        items = self._sample([request_seed(self.seed, number) for number in range(len(self.problems))], deadline)
        groups, extras = [item.group for item in items], [item.extras for item in items]
        scored = self.rewarder.score(groups, extras=extras, on_error="fail")
        for group, excluded in zip(scored.groups, scored.excluded, strict=True):
            note_excluded(group, excluded)
        if self.keep is not None:
            self.keep(step, scored.groups)
        judged = [group.without(excluded) for group, excluded in zip(scored.groups, scored.excluded, strict=True)]
        return self._result(step, judged, seconds=time.monotonic() - started)

    def _sample(self, seeds: Sequence[int], deadline: Deadline) -> list[Item]:
        if self.episodes is not None:
            played = self.episodes.play_all(self.problems, seeds=seeds, count=self.samples, deadline=deadline)
            return [item_of(prompt, of_one) for prompt, of_one in zip(self.problems, played, strict=True)]
        groups = generate_groups(
            self.problems,
            engine=self.engine,
            params=self.params,
            num_generations=self.samples,
            seeds=seeds,
            decode=self.decode,
            deadline=deadline,
        )
        return [Item(group) for group in groups]

    def _result(self, step: int, groups: Sequence[Group], *, seconds: float) -> EvalResult:
        judged = [group for group in groups if group.samples]
        samples = [sample for group in judged for sample in group.samples]
        if not samples:
            raise RewardError(
                f"evaluation at step {step}: no completion of {len(groups)} problems could be judged",
                remedy="look in the run's failures.jsonl for the causes",
            )
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if not rewards:
            raise RewardError(
                f"evaluation at step {step}: every reward function abstained on all {len(samples)} problems",
                remedy="let at least one function judge the held-out problems",
            )
        return EvalResult(
            step=step,
            accuracy=sum(reward >= self.success_reward for reward in rewards) / len(samples),
            mean_reward=sum(rewards) / len(rewards),
            problems=len(judged),
            mean_length=sum(len(sample.completion_ids) for sample in samples) / len(samples),
            seconds=seconds,
            samples=self.samples,
            pass_at_k=sum(map(self._solved, judged)) / len(judged) if self.samples > 1 else None,
        )

    def _solved(self, group: Group) -> bool:
        return any(reward is not None and reward >= self.success_reward for reward in group.rewards)


class Evaluates(Protocol):
    """Measurement of the engine's current weights."""

    def run(self, step: int) -> EvalResult: ...


class Benchmarks(Evaluates, Protocol):
    """Measurement of the engine's current weights on named benchmarks."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ScheduledEvaluation:
    """Evaluation when it is due: before the first step, every N steps, and after the last.

    Args:
        evaluator: ``None`` without held-out problems.
        every_steps: 0 leaves only the first and the last.
        benchmarks: evaluated at the same steps; without held-out problems the result is theirs.
    """

    evaluator: Evaluates | None
    every_steps: int
    last_step: int
    benchmarks: Benchmarks | None = None

    def close(self) -> None:
        """Stop the players of multi-turn completions. Idempotent."""
        if isinstance(self.evaluator, Evaluator) and self.evaluator.episodes is not None:
            self.evaluator.episodes.close()
        if self.benchmarks is not None:
            self.benchmarks.close()

    def due(self, step: int) -> bool:
        """Return True if the weights after ``step`` are evaluated, so that the engine must have them."""
        return step in (0, self.last_step) or (self.every_steps > 0 and step % self.every_steps == 0)

    def maybe_run(self, step: int) -> EvalResult | None:
        """Evaluate the weights after ``step`` if that is due. Raises as :meth:`Evaluator.run`."""
        if not self.due(step):
            return None
        result = None if self.evaluator is None else self.evaluator.run(step)
        if self.benchmarks is None:
            return result
        found = self.benchmarks.run(step)
        seconds = found.seconds + (0.0 if result is None else result.seconds)
        return replace(result or found, benchmarks=found.benchmarks, seconds=seconds)
