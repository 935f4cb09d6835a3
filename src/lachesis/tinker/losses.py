"""The protocol's loss functions: a formula for a token each, summed over all tokens of a request.

Nothing is divided by a count: whoever wants a mean scales weights or advantages. π is the adapter's policy, q what the
client says that the sampler's was, r = π/q. tests/unit/tinker/test_losses.py holds ``ppo`` and ``cispo`` against
:mod:`lachesis.train.losses.loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lachesis.common.errors import DataError, nearest

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


def cross_entropy(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-w·log π. [T]"""
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-r·A. [T]"""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-min(r·A, clip(r, low, high)·A) (PPO, arXiv 1707.06347). [T]"""
    ratio = _ratio(logprobs, inputs)
    return -torch.minimum(ratio * inputs["advantages"], _clip(ratio, options) * inputs["advantages"])


def cispo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-sg(clip(r, low, high))·A·log π (MiniMax-M1, arXiv 2506.13585). [T]"""
    return -_clip(_ratio(logprobs, inputs), options).detach() * inputs["advantages"] * logprobs


class Loss(NamedTuple):
    """``inputs`` that each datum has beside its targets, and ``options`` with their defaults."""

    per_token: Callable[[Tensor, Inputs, Options], Tensor]
    inputs: Sequence[str]
    options: Options


_POLICY = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), {}),
    "importance_sampling": Loss(importance_sampling, _POLICY, {}),
    "ppo": Loss(ppo, _POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(cispo, _POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
}


def loss_named(name: str) -> Loss:
    """Raises DataError for one that is not served."""
    if name not in LOSSES:
        raise DataError(
            f"the loss function {name!r} is not served here",
            remedy=f"use one of {', '.join(LOSSES)}, or forward_backward_custom, whose loss the client computes",
        )
    return LOSSES[name]


def options_of(name: str, given: Options) -> Options:
    """The loss function's options with those given. Raises DataError for one that it does not have."""
    known = loss_named(name).options
    for option in given:
        if option not in known:
            near = nearest(option, known)
            raise DataError(
                f"loss_fn_config has {option!r}, which {name} does not take",
                remedy=f"did you mean {near!r}?" if near else f"it takes {', '.join(known) or 'none'}",
            )
    return {**known, **given}


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clip(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
