"""Custom loss functions, named by import path.

Such a function gives the loss of each token, ℓ. Everything around it stays: normalization by the configured
``loss_type``, masks, sampler correction, KL and entropy terms. So the result does not depend on how a step is cut into
micro-batches::

    # in my_loss.py; algorithm.loss: my_loss.py:ppo_without_clip
    def ppo_without_clip(logprobs, *, old_logprobs, advantages, **rest):
        return -(logprobs - old_logprobs).exp() * advantages
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from lachesis.common.contracts import Part, contract, load_part
from lachesis.common.errors import TrainingError
from lachesis.config.schema import AlgorithmConfig
from lachesis.train.losses.ratios import Terms


class CustomTokenLoss(Protocol):
    """Signature of a custom loss: ``logprobs`` first, the others by name if the function declares them."""

    def __call__(
        self,
        logprobs: Tensor,
        *,
        old_logprobs: Tensor,
        sampling_logprobs: Tensor | None,
        ref_logprobs: Tensor | None,
        entropies: Tensor,
        ratio: Tensor,
        advantages: Tensor,
        mask: Tensor,
        row: Tensor,
        num_rows: int,
        options: SimpleNamespace,
    ) -> Tensor:
        """Return the loss of each token, float [T], with gradient.

        T tokens of S rows stand in one stream. Values where the mask is 0 are 0 (ratio: 1), and results there do not
        count.

        Args:
            logprobs: float [T] under the current policy, with gradient.
            old_logprobs: float [T], log π_old.
            sampling_logprobs: float [T], the sampler's, NaN where unknown.
            ref_logprobs: float [T], or ``None`` without a reference; naming it (not ``**rest``) asks for one, even if
                ``beta`` is 0.
            entropies: float [T] of the current policy, with gradient.
            ratio: float [T], π/π_old of the configured level, with gradient.
            advantages: float [T], that of the token's row.
            mask: float [T], 1 where the token counts, else 0.
            row: int64 [T], 0..S-1, not in order.
            num_rows: S.
            options: the keys of ``algorithm`` by name, and those that :func:`given_options` adds.
        """
        ...


LOSS = contract("loss", CustomTokenLoss, error=TrainingError)


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """Checked :class:`CustomTokenLoss`, which replaces a loss type's ℓ (``policy_loss(token_loss=)``).

    ``needs_reference``: it names ``ref_logprobs``; ``max_completion_length``: its value in the options.
    """

    part: Part
    max_completion_length: int | None = None

    @property
    def function(self) -> Callable[..., Any]:
        return self.part.function

    @property
    def needs_reference(self) -> bool:
        return "ref_logprobs" in self.part.names

    def __call__(self, terms: Terms, options: AlgorithmConfig) -> Tensor:
        """Return the loss of each token, [T], 0 where the mask is.

        Raises:
            TrainingError: the function raised, or its result is not a loss of each token.
        """
        if not terms.logprobs.numel():
            return terms.logprobs
        returned = self.part(terms.logprobs, **self._everything(terms, options))
        values = _require_token_loss(self.part.spec, returned, terms.logprobs)
        values = values.masked_fill(terms.rows.mask == 0, 0.0)
        if not values.isfinite().all():
            raise TrainingError(
                f"{self.part.title} returned {int((~values.isfinite()).sum())} values that are not finite, "
                f"of {values.numel()}",
                remedy="limit its ratios and logarithms",
            )
        return values

    def _everything(self, terms: Terms, options: AlgorithmConfig) -> dict[str, Any]:
        return {
            "old_logprobs": terms.old,
            "sampling_logprobs": terms.sampled,
            "ref_logprobs": terms.reference,
            "entropies": terms.entropies,
            "ratio": terms.ratio,
            "advantages": terms.advantages,
            "mask": terms.rows.mask,
            "row": terms.rows.row,
            "num_rows": terms.rows.size,
            "options": given_options(options, max_completion_length=self.max_completion_length),
        }


def given_options(algorithm: AlgorithmConfig, *, max_completion_length: int | None) -> SimpleNamespace:
    """Return the keys of the algorithm section, with the bounds and lengths that follow from them and the run."""
    own = {"epsilon_high": algorithm.upper_epsilon} if algorithm.loss_type == "cispo" else {}
    return SimpleNamespace(
        **{**dict(algorithm), **own},
        upper_epsilon=algorithm.upper_epsilon,
        ignores_zero_advantage=algorithm.ignores_zero_advantage,
        max_completion_length=max_completion_length,
    )


def load_custom_loss(given: str | Mapping[str, Any], *, max_completion_length: int | None = None) -> CustomLoss:
    """Load the loss function that a configuration names.

    Raises:
        ConfigError: there is none, or it needs an argument that losses do not get.
    """
    return CustomLoss(load_part(given, LOSS), max_completion_length=max_completion_length)


def _require_token_loss(spec: str, returned: Any, logprobs: Tensor) -> Tensor:
    if not isinstance(returned, Tensor):
        problem = f"returned a {type(returned).__name__}"
    elif returned.shape != logprobs.shape:
        problem = f"returned shape {tuple(returned.shape)} for {logprobs.numel()} tokens"
    elif not returned.is_floating_point() or returned.device != logprobs.device:
        problem = f"returned {returned.dtype} on {returned.device}, not floats on {logprobs.device}"
    elif logprobs.requires_grad and torch.is_grad_enabled() and not returned.requires_grad:
        problem = "returned values that do not depend on the logprobs, so nothing would be learned"
    else:
        return returned.to(logprobs.dtype)
    raise TrainingError(
        f"the loss {spec} {problem}",
        remedy=f"return one value per token, float [{logprobs.numel()}], computed from the logprobs",
    )
