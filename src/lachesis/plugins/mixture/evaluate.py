"""Evaluation of several sources: each by itself, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lachesis.common.types import EvalResult
from lachesis.rollouts.evaluate import Evaluates


@dataclass(frozen=True, slots=True)
class MixedEvaluator:
    """Evaluates on the held-out problems of several sources: each by itself, and all of them together.

    Args:
        evaluators: of the sources that have held-out problems, by name.
        done: is told the step once all are done.
    """

    evaluators: Mapping[str, Evaluates]
    done: Callable[[int], None] = lambda step: None

    def run(self, step: int) -> EvalResult:
        """Return the mean over all problems, and the results of each source. Raises as :meth:`Evaluator.run`."""
        found = {name: evaluator.run(step) for name, evaluator in self.evaluators.items()}
        self.done(step)
        results = list(found.values())
        solved = [one.accuracy if one.pass_at_k is None else one.pass_at_k for one in results]
        several = max(one.samples for one in results)

        def mean(values: Sequence[float]) -> float:
            weighted = (value * one.problems for value, one in zip(values, results, strict=True))
            return sum(weighted) / sum(one.problems for one in results)

        return EvalResult(
            step=step,
            accuracy=mean([one.accuracy for one in results]),
            mean_reward=mean([one.mean_reward for one in results]),
            problems=sum(one.problems for one in results),
            mean_length=mean([one.mean_length for one in results]),
            seconds=sum(one.seconds for one in results),
            samples=several,
            pass_at_k=mean(solved) if several > 1 else None,
            by_source={
                name: {"accuracy": one.accuracy, "mean_reward": one.mean_reward, "problems": one.problems}
                for name, one in found.items()
            },
        )
