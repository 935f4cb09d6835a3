"""Custom optimizers and schedules, named by import path.

Everything around them stays: clipping, the precision of updates, warm-up, skipped steps, checkpoints. Any class of
``torch.optim`` that takes groups of parameters is one::

    optimizer: {function: {function: torch.optim.SGD, kwargs: {momentum: 0.9}}}
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from lachesis.common.contracts import Part, contract, load_part
from lachesis.common.errors import TrainingError
from lachesis.config.schema import OptimizerConfig

logger = logging.getLogger("lachesis")


class CustomOptimizer(Protocol):
    """Signature of a custom optimizer: the groups first, the others by name if the class or function declares them."""

    def __call__(
        self, params: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> Optimizer:
        """Return the optimizer; called several times if the parameters are split.

        Args:
            params: groups of parameters, each a dictionary with ``params`` and ``weight_decay``. ``lr`` is set in each
                before each step. If weights are sharded, a parameter is this device's part, in another shape, so the
                optimizer must work element by element.
            lr: the peak rate.
            betas, eps: ``optimizer.betas`` and ``optimizer.eps``.
        """
        ...


class CustomSchedule(Protocol):
    """Signature of a custom schedule: ``step`` first, the others by name if the function declares them."""

    def __call__(self, step: int, *, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
        """Return the factor on the peak learning rate, at least 0; warm-up is left to the function.

        Args:
            step: the optimizer step, counted from 0. The function may be asked for the same step several times.
            total_steps: of the whole run.
            warmup_steps: from ``optimizer.warmup_steps`` or ``warmup_ratio``.
            min_lr_ratio: ``optimizer.min_lr_ratio``.
        """
        ...


OPTIMIZER = contract("optimizer", CustomOptimizer, error=TrainingError, makes=Optimizer, methods=("step",))
SCHEDULE = contract("schedule", CustomSchedule, error=TrainingError)


def custom_optimizer_factory(
    config: OptimizerConfig, *, learning_rate: float
) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """Return a factory of ``optimizer.function`` over groups of parameters. Raises ConfigError if it is missing.

    Logs a changed ``optimizer.betas`` or ``eps`` that the function does not take.
    """
    assert config.function is not None
    part = load_part(config.function, OPTIMIZER)
    defaults = OptimizerConfig()
    for name in ("betas", "eps"):
        if getattr(config, name) != getattr(defaults, name) and name not in part.arguments:
            logger.warning("optimizer.%s does nothing: %s takes no %s from it", name, part.title, name)
    return lambda groups: part.make(groups, lr=learning_rate, betas=config.betas, eps=config.eps)


def load_custom_schedule(config: OptimizerConfig) -> Part | None:
    """Load the function of ``optimizer.schedule_function``.

    Raises ConfigError if it names none.
    """
    return None if config.schedule_function is None else load_part(config.schedule_function, SCHEDULE)


def custom_factor(part: Part, step: int, *, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Return the factor on the peak learning rate.

    Raises TrainingError if the function fails or returns something else.
    """
    returned = part(step, total_steps=total_steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
    try:
        factor = float(returned)
    except (TypeError, ValueError):
        factor = math.nan
    if not math.isfinite(factor) or factor < 0:
        raise TrainingError(
            f"{part.title} returned {returned!r} at step {step}", remedy="return a number that is at least 0"
        )
    return factor
