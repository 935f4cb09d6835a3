"""Custom advantage functions, named by import path.

They see all groups of a step at once, and replace the group's mean and deviation::

    # in mine.py; algorithm.advantage: mine.py:centered
    def centered(rewards, *, group, **rest):
        total = rewards.nansum(dim=1)
        means = torch.stack([total[group == one].mean() for one in group.unique()])
        return total - means[group]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lachesis.common.contracts import Part, contract
from lachesis.common.errors import TrainingError
from lachesis.common.types import Group
from lachesis.config.schema import AlgorithmConfig
from lachesis.train.losses.advantage import assign_advantages, reward_tensor


class CustomAdvantage(Protocol):
    """Signature of a custom advantage: ``rewards`` first, the others by name if the function declares them."""

    def __call__(
        self,
        rewards: Tensor,
        *,
        group: Tensor,
        weights: Tensor,
        groups: Sequence[Group],
        options: AlgorithmConfig,
    ) -> Tensor | Sequence[float]:
        """Return the advantage of each of N completions, [N]: those of one optimizer step, group after group.

        The result for a completion without rewards does not count: its advantage is 0.

        Args:
            rewards: float64 [N, K], of K reward functions, NaN where one abstained.
            group: int64 [N], 0..G-1, each completion's group.
            weights: float64 [K], of the reward functions.
            groups: the G groups themselves, with prompts, tokens, logprobs and texts.
            options: the section ``algorithm``.
        """
        ...


ADVANTAGE = contract("advantage", CustomAdvantage, error=TrainingError)


def custom_assigner(
    part: Part, *, options: AlgorithmConfig, weights: Sequence[float] | None
) -> Callable[[Sequence[Group]], list[Group]]:
    """Return a function that sets the advantage of each sample by the part; ``weights`` one per reward, all 1 if unset.

    It raises RewardError if no sample has a reward, and TrainingError if the user's function fails.
    """

    def assign(groups: Sequence[Group]) -> list[Group]:
        def compute(
            rows: Sequence[Sequence[float | None]], number: Sequence[int], lengths: Sequence[int]
        ) -> list[float]:
            rewards = reward_tensor(rows)
            returned = part(
                rewards,
                group=torch.tensor(number),
                weights=torch.ones(rewards.shape[1], dtype=torch.float64)
                if weights is None
                else torch.tensor(weights, dtype=torch.float64),
                groups=tuple(groups),
                options=options,
            )
            found = _require_advantages(part, returned, count=len(rows), unscored=rewards.isnan().all(dim=1))
            return found.numpy().tolist()

        return assign_advantages(groups, compute=compute)

    return assign


def _require_advantages(part: Part, returned: Any, *, count: int, unscored: Tensor) -> Tensor:
    try:
        values = torch.as_tensor(returned, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        problem = f"returned a {type(returned).__name__}"
    else:
        if values.shape == (count,):
            values = values.masked_fill(unscored, 0.0)
            if values.isfinite().all():
                return values
            problem = f"returned {int((~values.isfinite()).sum())} values that are not finite, of {count}"
        else:
            problem = f"returned shape {tuple(values.shape)} for {count} completions"
    raise TrainingError(f"{part.title} {problem}", remedy=f"return one number per completion, [{count}]")
