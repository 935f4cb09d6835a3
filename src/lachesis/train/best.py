"""Best model of a run by its evaluations, and the end of a run that does not improve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lachesis.common.types import EvalResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BestModel:
    """Record of the best evaluation so far, by its mean reward.

    Args:
        save: saves the model of a step; ``None`` if the best model is not kept.
        patience: number of evaluations without a better one after which the run ends; ``None`` for no end.
    """

    save: Callable[[int], None] | None
    patience: int | None
    best: EvalResult | None = None
    without_better: int = 0
    ended: bool = field(default=False, init=False)

    def recall(self, evaluations: Iterable[EvalResult]) -> None:
        """Restore the evaluations of a resumed run, whose best model is saved already."""
        for evaluation in evaluations:
            self._is_better(evaluation)

    def take(self, evaluation: EvalResult) -> bool:
        """Add an evaluation, and save its model if it is the best; return True if the run should end."""
        if self._is_better(evaluation) and self.save is not None and evaluation.step:
            self.save(evaluation.step)
        if self.patience is not None and self.without_better >= self.patience and self.best is not None:
            self.ended = True
            logger.warning(
                "the run ends (evaluation.patience): %d evaluations in a row were no better than the one at step %d "
                "(mean reward %.4g)",
                self.without_better,
                self.best.step,
                self.best.mean_reward,
            )
        return self.ended

    def _is_better(self, evaluation: EvalResult) -> bool:
        if self.best is not None and evaluation.mean_reward <= self.best.mean_reward:
            self.without_better += 1
            return False
        self.best, self.without_better = evaluation, 0
        return True
