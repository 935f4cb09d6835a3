"""The protocol's loss functions: a formula for each token of a datum, summed over all tokens of a request.

Nothing is divided by a count: for a mean, scale weights or advantages. π is the adapter's policy, q the sampler's
as the client reports it, r = π/q, A the advantage; no gradient goes through sg. The formulas are those of the
service's documentation (tinker-docs.thinkingmachines.ai/tinker/losses).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lachesis.common.errors import DataError, did_you_mean

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


def cross_entropy(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return -w·log π [T]."""
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return -r·A [T]."""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return -min(r·A, clip(r, low, high)·A) [T] (PPO, arXiv 1707.06347)."""
    ratio = _ratio(logprobs, inputs)
    return -torch.minimum(ratio * inputs["advantages"], _clip(ratio, options) * inputs["advantages"])


def cispo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return -sg(clip(r, low, high))·A·log π [T] (MiniMax-M1, arXiv 2506.13585)."""
    return -_clip(_ratio(logprobs, inputs), options).detach() * inputs["advantages"] * logprobs


def dro(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return -(A·log π - β/2·(log π - log q)²) [T] (DRO, arXiv 2405.19107)."""
    drift = logprobs - inputs["logprobs"]
    return -(inputs["advantages"] * logprobs - 0.5 * options["beta"] * drift**2)


def gspo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return -min(s·A, clip(s, low, high)·A) [T], s = sg(exp(mean log r))·π/sg(π) (GSPO-token, arXiv 2507.18071).

    The mean is over the tokens of the datum whose ``sequence_ratio_mask`` is not 0.
    """
    sampled = inputs["sequence_ratio_mask"] != 0
    log_ratio = (logprobs.detach() - inputs["logprobs"])[sampled].mean()
    ratio = (log_ratio + logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * inputs["advantages"], _clip(ratio, options) * inputs["advantages"])


class Loss(NamedTuple):
    """``inputs`` that each datum has beside its targets, and ``options`` with their defaults.

    An option whose default is None must be given: the service does not document its default.
    """

    per_token: Callable[[Tensor, Inputs, Options], Tensor]
    inputs: Sequence[str]
    options: Mapping[str, float | None]

    def summed(self, logprobs: Tensor, inputs: Inputs, options: Options, *, lengths: Sequence[int]) -> Tensor:
        """Sum over all tokens of consecutive data, each of ``lengths`` tokens: [T] -> []."""
        own = {name: values.split([*lengths]) for name, values in inputs.items()}
        return torch.stack(
            [
                self.per_token(part, {name: values[index] for name, values in own.items()}, options).sum()
                for index, part in enumerate(logprobs.split([*lengths]))
            ]
        ).sum()


_POLICY = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), {}),
    "importance_sampling": Loss(importance_sampling, _POLICY, {}),
    "ppo": Loss(ppo, _POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(cispo, _POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(dro, _POLICY, {"beta": None}),
    "gspo": Loss(gspo, (*_POLICY, "sequence_ratio_mask"), {"clip_low_threshold": None, "clip_high_threshold": None}),
}


def loss_named(name: str) -> Loss:
    """Return the loss function of this name. Raises DataError if it is not served."""
    if name not in LOSSES:
        raise DataError(
            f"the loss function {name!r} is not served here",
            remedy=f"use one of {', '.join(LOSSES)}, or forward_backward_custom, whose loss the client computes",
        )
    return LOSSES[name]


def options_of(name: str, given: Options) -> Options:
    """Return the loss function's options, with the given ones.

    Raises:
        DataError: one is not finite or unknown, or one without a default is missing.
    """
    known = loss_named(name).options
    for option in given:
        if option not in known:
            raise DataError(
                f"loss_fn_config has {option!r}, which {name} does not take",
                remedy=did_you_mean(option, known, otherwise=f"it takes {', '.join(known) or 'none'}"),
            )
        if not math.isfinite(given[option]):
            raise DataError(f"loss_fn_config has {option} {given[option]:g}", remedy="give a finite number")
    options = {**known, **given}
    if missing := [option for option, value in options.items() if value is None]:
        raise DataError(
            f"{name} needs {' and '.join(missing)} in loss_fn_config: this server has no default",
            remedy=f"pass loss_fn_config={{{missing[0]!r}: ...}} to forward_backward",
        )
    return {option: value for option, value in options.items() if value is not None}


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clip(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
