"""Custom optimizers, named by import path.

Everything around them stays: clipping, the precision of updates, warm-up, skipped steps, checkpoints. Any class of
``torch.optim`` that takes groups of parameters is one::

    optimizer: {function: {function: torch.optim.SGD, kwargs: {momentum: 0.9}}}
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from lachesis.common.contracts import contract, load_part
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


OPTIMIZER = contract("optimizer", CustomOptimizer, error=TrainingError, makes=Optimizer, methods=("step",))


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
