"""Advantages, which compare each completion with its group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lachesis.common.errors import ConfigError, RewardError, TrainingError
from lachesis.common.types import Group
from lachesis.config.schema import AlgorithmConfig

EPSILON = 1e-4
"""The number added to standard deviations before dividing, as in TRL."""


AdvantageFunction = Callable[[Sequence[Sequence[float | None]], Sequence[int], Sequence[int]], list[float]]
"""A function of rewards [N][K] (None: it abstained), group numbers [N] and loss tokens [N] to advantages [N]."""


class Moments(NamedTuple):
    """Mean and sample standard deviation (n-1) of each row's group, at the row: [N, K]."""

    mean: Tensor
    std: Tensor


def advantage_function(
    algorithm: AlgorithmConfig, *, weights: Sequence[float] | None, added: Sequence[float] | None = None
) -> AdvantageFunction:
    """Return :func:`group_advantages` on lists, with the options of ``algorithm``.

    Args:
        weights: one number per reward function, all 1 if unset.
        added: a number for each completion, added to the sum of its rewards.
    """

    def compute(rewards: Sequence[Sequence[float | None]], group: Sequence[int], lengths: Sequence[int]) -> list[float]:
        advantages = group_advantages(
            reward_tensor(rewards),
            group=torch.tensor(group),
            lengths=torch.tensor(lengths),
            weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
            scale_rewards=algorithm.scale_rewards,
            baseline=algorithm.baseline,
            aggregation=algorithm.aggregation,
            clip=algorithm.reward_clip,
            added=None if added is None else torch.tensor(added, dtype=torch.float64),
        )
        return advantages.numpy().tolist()

    return compute


def reward_tensor(rewards: Sequence[Sequence[float | None]]) -> Tensor:
    """Return rewards [N][K] as float64 [N, K], with NaN where a function abstained."""
    return torch.tensor(
        [[math.nan if value is None else value for value in row] for row in rewards], dtype=torch.float64
    )


def assign_advantages(groups: Sequence[Group], *, compute: AdvantageFunction | None = None) -> list[Group]:
    """Set every sample's advantage from the rewards of all groups, which some normalizations need at once.

    Args:
        compute: function from rewards to advantages; if unset GRPO's, of the unweighted sum of rewards.

    Raises:
        RewardError: no sample has any reward.
    """
    rewards = [sample.rewards for group in groups for sample in group.samples]
    if rewards and all(value is None for row in rewards for value in row):
        raise RewardError(
            f"every reward function abstained on all {len(rewards)} completions of this step",
            remedy="let at least one function judge, or train on more prompts per step (batch.prompts_per_step)",
        )
    compute = compute or advantage_function(AlgorithmConfig(), weights=None)
    number = [i for i, group in enumerate(groups) for _ in group.samples]
    lengths = [sample.num_learned for group in groups for sample in group.samples]
    advantages = iter([value for _, value in zip(number, compute(rewards, number, lengths), strict=True)])
    return [
        replace(group, samples=tuple(replace(sample, advantage=next(advantages)) for sample in group.samples))
        for group in groups
    ]


def group_advantages(
    rewards: Tensor,
    *,
    group: Tensor,
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
    scale_rewards: str = "group",
    baseline: str = "group_mean",
    aggregation: str = "sum_then_normalize",
    clip: tuple[float, float] | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Return the advantages of N completions from K rewards each (GRPO, arXiv 2402.03300; formulas of TRL 1.16).

    - ``sum_then_normalize``: R = Σ_k w_k·r_k, A = R - mean_group(R), divided by std_group(R) + 1e-4
      (``scale_rewards="group"``), by std_batch(R) + 1e-4 (``"batch"``), or as it is (``"none"``). ``baseline`` replaces
      mean_group(R), and ``scale_rewards`` the divisor: :data:`BASELINES` and :data:`SCALES` have the formulas and
      sources.
    - ``normalize_then_sum``: z_k = (r_k - mean_group(r_k)) / (std_group(r_k) + 1e-4), R = Σ_k w_k·z_k,
      A = (R - mean_batch(R)) / (std_batch(R) + 1e-4), whatever ``scale_rewards`` (GDPO, arXiv 2601.05242).

    NaN stands for a missing reward, which is left out of the sum. A row without any reward is outside all means and
    deviations, and its advantage is 0. With a baseline, the advantage of the only scored row of a group is 0 too,
    because there is nothing to compare it with (in GDPO: that z_k is 0). Equal rewards throughout a group give exactly
    0 under ``sum_then_normalize``.

    Args:
        rewards: float [N, K], NaN where there is none. All rows of the step, on all ranks.
        group: int64 [N], any label per group; groups may interleave and differ in size.
        lengths: int64 [N], loss tokens of each completion; all alike if ``None``.
        weights: float [K]; all 1 if ``None``.
        clip: bounds of R.
        added: float [N], added to R within its bounds.

    Returns:
        float [N], of the dtype of ``rewards``.

    Raises:
        ConfigError: an unknown option.
        TrainingError: shapes that do not fit.
        RewardError: an infinite reward.
    """
    _require_inputs(rewards, group, weights, scale_rewards, baseline, aggregation)
    weights = rewards.new_ones(rewards.shape[1]) if weights is None else weights.to(rewards)
    index = torch.searchsorted(group.unique(), group)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # untyped in torch
    whole_batch = torch.zeros_like(index)
    unscored = rewards.isnan().all(dim=1)
    lengths = torch.ones_like(index) if lengths is None else lengths

    if aggregation == "sum_then_normalize":
        total = _weighted_sum(rewards, weights, unscored)
        total = total if clip is None else total.clamp(*clip)
        total = total if added is None else total + added.to(total).unsqueeze(1)
        scored = Scored(total, index, whole_batch, lengths.to(total).unsqueeze(1), (~unscored).unsqueeze(1))
        advantages = SCALES[scale_rewards](BASELINES[baseline](scored), scored)
    else:
        total = _weighted_sum(standardized(rewards, index), weights, unscored)
        advantages = standardized(total, whole_batch)
    return advantages.squeeze(1).masked_fill(unscored, 0.0)


class Scored(NamedTuple):
    """Summed rewards, with what baselines and divisors take: all [N, 1], but the indices [N].

    Attributes:
        total: rewards, NaN where no function judged.
        group, batch: number of the group, and 0 throughout.
        lengths: loss tokens.
        known: whether any function judged.
    """

    total: Tensor
    group: Tensor
    batch: Tensor
    lengths: Tensor
    known: Tensor

    @property
    def of_group(self) -> Moments:
        """Return the moments of each row's group."""
        return moments(self.total, self.group)


def leave_one_out(scored: Scored) -> Tensor:
    """Return R - Σ_{j≠i} R_j/(n - 1) = (R - mean_group(R))·n/(n - 1) (RLOO, arXiv 2402.14740)."""
    count = _group_sum(scored.known.to(scored.total), scored.group)
    return (scored.total - scored.of_group.mean) * count / (count - 1).clamp(min=1)


def length_weighted(scored: Scored) -> Tensor:
    """Return R - Σ_j l_j·R_j / Σ_j l_j with the lengths l of the group's completions (OPO, arXiv 2505.23585)."""
    lengths = scored.lengths * scored.known
    mean = scored.of_group.mean  # the weighted mean is taken of distances from it, so that equal rewards give 0
    weighted = _group_sum((lengths * (scored.total - mean)).nan_to_num(nan=0.0), scored.group)
    return scored.total - mean - weighted / _group_sum(lengths, scored.group).clamp(min=1)


def whitened_tokens(advantages: Tensor, scored: Scored) -> Tensor:
    """Return (A - mean) / sqrt(var + 1e-8) with the moments of all tokens of the batch (REINFORCE++, 2501.03262).

    Each completion counts as often as it has loss tokens; the variance is that of a sample, as in verl.
    """
    mean, scale = whitened(advantages.nan_to_num(nan=0.0), scored.lengths * scored.known)
    return (advantages - mean) * scale


def whitened_completions(advantages: Tensor, scored: Scored) -> Tensor:
    """Return (A - mean) / (std + 1e-4) over the batch, without rows that have nothing to compare with (TRL's RLOO)."""
    alone = _group_sum(scored.known.to(scored.total), scored.group) < 2
    return standardized(advantages.masked_fill(alone, math.nan), scored.batch).masked_fill(alone, 0.0)


def whitened(values: Tensor, count: Tensor | None = None) -> tuple[float, float]:
    """Return mean and 1/sqrt(var + 1e-8) of values with these counts, 1 if unset."""
    count = torch.ones_like(values) if count is None else count
    mean = (count * values).sum() / count.sum().clamp(min=1)
    variance = (count * (values - mean) ** 2).sum() / (count.sum() - 1).clamp(min=1)
    return float(mean), float((variance + 1e-8).rsqrt())


def over_signal(advantages: Tensor, scored: Scored) -> Tensor:
    """Return A·B/(B - M), with M of all B completions unjudged or in groups of equal rewards (GPG, 2504.02546)."""
    differs = scored.known & (scored.of_group.std > 0)
    return advantages * len(differs) / differs.sum().clamp(min=1)


BASELINES: Mapping[str, Callable[[Scored], Tensor]] = {
    "group_mean": lambda scored: scored.total - scored.of_group.mean,
    "leave_one_out": leave_one_out,
    "length_weighted": length_weighted,
    "none": lambda scored: scored.total,
}
"""Rewards less their baseline, by the name in ``algorithm.baseline``: [N, 1]."""

SCALES: Mapping[str, Callable[[Tensor, Scored], Tensor]] = {
    "group": lambda advantages, scored: advantages / (scored.of_group.std + EPSILON),
    "batch": lambda advantages, scored: advantages / (moments(scored.total, scored.batch).std + EPSILON),
    "none": lambda advantages, scored: advantages,
    "advantages": whitened_completions,
    # MaxRL, arXiv 2602.02710, with the 1e-6 of its authors' code, and TRL's absolute value.
    "mean": lambda advantages, scored: advantages / (scored.of_group.mean.abs() + 1e-6),
    "tokens": whitened_tokens,
    "signal": over_signal,
}
"""Advantages divided by a scale, by the name in ``algorithm.scale_rewards``: [N, 1]."""


def standardized(values: Tensor, index: Tensor) -> Tensor:
    """Return (x - mean) / (std + 1e-4) over the rows of equal ``index``; NaN stays NaN: [N, K]."""
    mean, std = moments(values, index)
    return (values - mean) / (std + EPSILON)


def moments(values: Tensor, index: Tensor) -> Moments:
    """Return mean and deviation over the rows of equal ``index`` (0..G-1, [N]), by column, without the NaN.

    The deviation of a single value is 0.
    """
    known = ~values.isnan()
    count = _group_sum(known.to(values.dtype), index)
    # Distances from the group's least value: where all are equal they are 0, and so exactly is their mean.
    least = _group_min(values.masked_fill(~known, math.inf), index)
    distance = (values - least).masked_fill(~known, 0.0)
    mean_distance = _group_sum(distance, index) / count.clamp(min=1)
    squares = ((distance - mean_distance) ** 2).masked_fill(~known, 0.0)
    variance = _group_sum(squares, index) / (count - 1).clamp(min=1)
    return Moments(mean=least + mean_distance, std=variance.sqrt())


def _weighted_sum(values: Tensor, weights: Tensor, unscored: Tensor) -> Tensor:
    """Return Σ_k w_k·x_k without the NaN; NaN for unscored rows: [N, K] -> [N, 1]."""
    total = (values * weights).nansum(dim=1, keepdim=True)
    return total.masked_fill(unscored.unsqueeze(1), math.nan)


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    """Return each row's sum over its group: [N, K]."""
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def _group_min(values: Tensor, index: Tensor) -> Tensor:
    """Return each row's minimum over its group: [N, K]."""
    least = torch.full_like(values, math.inf)
    return least.scatter_reduce_(0, index.unsqueeze(1).expand_as(values), values, "amin")[index]


def _require_inputs(
    rewards: Tensor, group: Tensor, weights: Tensor | None, scale_rewards: str, baseline: str, aggregation: str
) -> None:
    for name, value, allowed in (
        ("scale_rewards", scale_rewards, tuple(SCALES)),
        ("baseline", baseline, tuple(BASELINES)),
        ("aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} does not exist", remedy=f"choose one of {', '.join(allowed)}")
    if rewards.ndim != 2 or group.shape != rewards.shape[:1]:
        raise TrainingError(
            f"rewards have shape {tuple(rewards.shape)}, but group has shape {tuple(group.shape)}",
            remedy="give rewards [N, K], a column per reward function, and group [N]",
        )
    if weights is not None and weights.shape != rewards.shape[1:]:
        raise TrainingError(
            f"there are {weights.numel()} weights for {rewards.shape[1]} reward functions", remedy="give one for each"
        )
    if rewards.isinf().any():
        raise RewardError(
            f"{int(rewards.isinf().any(dim=1).sum())} of {len(rewards)} completions have an infinite reward",
            remedy="limit the values of the reward functions",
        )
