"""KL divergence to the reference: its estimators, its weight, and its place in the reward.

With the default ``algorithm.kl_placement: loss`` the term is a part of the loss (:mod:`lachesis.train.losses.loss`).
Otherwise it is taken off the reward before the advantage, and has no gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lachesis.common.types import Group, Sample
from lachesis.config.schema import AlgorithmConfig
from lachesis.metrics.values import Mean, MetricValue
from lachesis.train.losses.advantage import advantage_function, assign_advantages, whitened

# Bound of the error that changes the weight (Ziegler et al. 2019, section 2.2).
_MOST_ERROR = 0.2

ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: (-log_ratio).expm1() + log_ratio,  # exp() - 1 would round a small divergence away
}
"""Estimates of the divergence at tokens, from log π - log π_ref (J. Schulman, "Approximating KL divergence")."""

Measure = Callable[[Sequence[Group]], list[list[Tensor]]]
"""Function from groups to log π_old - log π_ref of each sample's counted tokens: float [tokens], by group."""


@dataclass(eq=False)
class KlWeight:
    """Weight β of the KL term, constant, or adapted to a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    After n completions of divergence KL it becomes β·(1 + e·n/horizon), e = clip(KL/target - 1, -0.2, 0.2), as in verl
    and OpenRLHF.

    Attributes:
        value: the current β.
        metrics: values observed since they were last taken.
    """

    value: float
    target: float | None = None
    horizon: int = 1
    metrics: dict[str, MetricValue] = field(default_factory=dict[str, MetricValue])

    @classmethod
    def of(cls, options: AlgorithmConfig) -> KlWeight:
        """Return a run's initial weight."""
        return cls(options.beta, options.kl_target, options.kl_horizon)

    def observe(self, kl: float, *, completions: int) -> None:
        """Adapt the weight to the mean divergence of a token, over so many completions."""
        self.metrics["kl_weight"] = Mean(self.value)
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MOST_ERROR), _MOST_ERROR)
            self.value *= 1 + error * completions / self.horizon

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore an adaptive weight from a policy's state; older checkpoints lack it and keep the configured one."""
        if self.target is not None:
            self.value = float(state.get("kl_weight", self.value))

    def take_metrics(self) -> dict[str, MetricValue]:
        """Return the metrics since the last call."""
        metrics, self.metrics = self.metrics, {}
        return metrics


@dataclass(frozen=True, eq=False)
class KlInReward:
    """Advantages of rewards less β·KL, estimated under the policy of the importance ratio.

    - ``reward``: R ← R - β·Σ_t KL_t, before baseline and scale (verl's ``use_kl_in_reward``, TRL's RLOO).
    - ``reward_to_go``: the advantage of token t is A - β·Σ_{s≥t} KL_s, with A of the rewards alone; whitening
      (``scale_rewards: tokens``) comes after it (OpenRLHF; REINFORCE++, arXiv 2501.03262).

    A completion without any reward keeps an advantage of 0. The target of β is compared with the mean over completions
    of their tokens' mean (``reward``, as in verl), or with the mean over tokens (as in OpenRLHF).
    """

    options: AlgorithmConfig
    weights: Sequence[float] | None
    measure: Measure
    beta: KlWeight

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with advantages.

        Raises:
            RewardError: no sample has any reward.
        """
        estimate = ESTIMATORS[self.options.kl_estimator or "k1"]
        divergences = [estimate(values.double()) for values in chain.from_iterable(self.measure(groups))]
        sums = [float(values.sum()) for values in divergences]
        beta, per_token = self.beta.value, _mean_of_tokens(divergences)
        by_completion = _mean([values.mean() for values in divergences if len(values)])
        of_reward = self.options.kl_placement == "reward"
        self.beta.observe(by_completion if of_reward else per_token, completions=len(sums))
        self.beta.metrics |= {
            "kl_reference": Mean(per_token),
            "kl_reward": Mean(-beta * sum(sums), max(len(sums), 1)),
        }
        if of_reward:
            penalties = [-beta * total for total in sums]
            compute = advantage_function(self.options, weights=self.weights, added=penalties)
            return assign_advantages(groups, compute=compute)
        to_go = [-beta * values.flip(0).cumsum(0).flip(0) for values in divergences]
        return _with_tokens(groups, to_go, self.options, weights=self.weights)


def _with_tokens(
    groups: Sequence[Group], added: Sequence[Tensor], options: AlgorithmConfig, *, weights: Sequence[float] | None
) -> list[Group]:
    """Set advantages of rewards, plus ``added`` at each sample's counted tokens; whitening is of the sum."""
    whitens = options.scale_rewards == "tokens"
    plain = options.model_copy(update={"scale_rewards": "none"}) if whitens else options
    assigned = assign_advantages(groups, compute=advantage_function(plain, weights=weights))
    of_token = iter(added)
    parts = [[(sample, next(of_token)) for sample in group.samples] for group in assigned]
    judged = [part for part in chain.from_iterable(parts) if _judged(part[0])]
    mean, scale = 0.0, 1.0
    if whitens and judged:
        mean, scale = whitened(torch.cat([(sample.advantage or 0.0) + values for sample, values in judged]))
    finish = partial(_spread, mean=mean, scale=scale)
    return [
        replace(group, samples=tuple(finish(sample, values) if _judged(sample) else sample for sample, values in pairs))
        for group, pairs in zip(assigned, parts, strict=True)
    ]


def _spread(sample: Sample, values: Tensor, *, mean: float, scale: float) -> Sample:
    """Return the sample with (A - mean)·scale, and ``values``·scale at its counted tokens beside what is there."""
    own: Iterator[float] = iter((values * scale).numpy())
    before = sample.token_advantages or (0.0,) * len(sample.completion_ids)
    places = zip(before, sample.loss_mask(), strict=True)
    added = tuple(value + (float(next(own)) if counted else 0.0) for value, counted in places)
    return replace(sample, advantage=((sample.advantage or 0.0) - mean) * scale, token_advantages=added)


def _judged(sample: Sample) -> bool:
    return any(value is not None for value in sample.rewards)


def _mean(values: Sequence[Tensor]) -> float:
    return float(torch.stack([*values]).mean()) if values else 0.0


def _mean_of_tokens(divergences: Sequence[Tensor]) -> float:
    return _mean([torch.cat([*divergences]).mean()]) if any(len(values) for values in divergences) else 0.0
