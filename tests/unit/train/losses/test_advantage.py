"""Advantages: TRL's own values, and the cases that its values leave open."""

from __future__ import annotations

import gzip
import json
import math
import statistics

import pytest
import torch

from lachesis.common.errors import ConfigError, RewardError, TrainingError
from lachesis.train.losses.advantage import group_advantages
from tests.paths import GOLDEN

FIXTURE = GOLDEN / "trl-1.16-losses.json.gz"
CASES = json.loads(gzip.decompress(FIXTURE.read_bytes()))["advantages"]
NAN = math.nan


def _rewards(rows: list[list[float | None]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([[NAN if value is None else value for value in row] for row in rows], dtype=dtype)


def _case_name(case: dict) -> str:
    weights = "weighted" if case["reward_weights"] else "plain"
    return "-".join((case["rewards_name"], case["scale_rewards"], case["multi_objective_aggregation"], weights))


@pytest.mark.parametrize("case", CASES, ids=_case_name)
@pytest.mark.parametrize(("dtype", "key", "tolerance"), [("float64", "f64", 1e-6), ("float32", "f32", 1e-5)])
def test_agrees_with_trl(case: dict, dtype: str, key: str, tolerance: float) -> None:
    rewards = _rewards(case["rewards"], getattr(torch, dtype))
    weights = case["reward_weights"] and torch.tensor(case["reward_weights"], dtype=rewards.dtype)
    expected = torch.tensor(case[f"advantages_{key}"], dtype=rewards.dtype)
    group = torch.arange(len(rewards)) // case["num_generations"]
    options = {"scale_rewards": case["scale_rewards"], "aggregation": case["multi_objective_aggregation"]}

    advantages = group_advantages(rewards, group=group, weights=weights, **options)
    assert advantages.dtype == rewards.dtype
    # Where the exact value is 0, TRL's is rounding: advantages are of the order of 1.
    torch.testing.assert_close(advantages, expected, rtol=tolerance, atol=0.1 * tolerance)

    shuffle = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(0))
    labels = 7 - 3 * group  # any labels, interleaved
    shuffled = group_advantages(rewards[shuffle], group=labels[shuffle], weights=weights, **options)
    torch.testing.assert_close(shuffled, expected[shuffle], rtol=tolerance, atol=0.1 * tolerance)


def test_groups_of_different_sizes_do_not_touch_each_other() -> None:
    rewards = _rewards([[1.0], [5.0], [0.0], [5.0], [2.0], [7.0]])
    group = torch.tensor([0, 1, 0, 1, 0, 1])
    expected = torch.empty(6, dtype=torch.float64)
    for label in (0, 1):
        own = rewards[group == label, 0]
        expected[group == label] = (own - own.mean()) / (own.std() + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, group=group), expected)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(scale_rewards: str, value: float) -> None:
    rewards = torch.tensor([[value]] * 7 + [[0.0], [1.0]], dtype=torch.float32)
    group = torch.tensor([0] * 7 + [1] * 2)
    advantages = group_advantages(rewards, group=group, scale_rewards=scale_rewards)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] < 0 < advantages[8]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_nothing_to_compare_with_is_zero(scale_rewards: str, aggregation: str) -> None:
    alone_in_its_group = _rewards([[1.0], [None], [None], [None], [None]])
    group = torch.tensor([0, 0, 1, 1, 2])
    advantages = group_advantages(alone_in_its_group, group=group, scale_rewards=scale_rewards, aggregation=aggregation)
    assert advantages.tolist() == [0.0] * 5


def test_unscored_rows_are_outside_the_baseline() -> None:
    rewards = _rewards([[1.0, 0.0], [0.0, None], [None, None], [0.0, 0.0]])
    advantages = group_advantages(rewards, group=torch.zeros(4, dtype=torch.int64), scale_rewards="none")
    torch.testing.assert_close(advantages, torch.tensor([2 / 3, -1 / 3, 0.0, -1 / 3], dtype=torch.float64))


def test_no_rows() -> None:
    assert group_advantages(torch.empty(0, 2), group=torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale_rewards": "std"}, ConfigError, "scale_rewards='std'"),
        ({"aggregation": "mean"}, ConfigError, "aggregation='mean'"),
        ({"weights": torch.ones(3)}, TrainingError, "3 weights for 2"),
        ({"group": torch.zeros(3, dtype=torch.int64)}, TrainingError, r"group has shape \(3,\)"),
        ({"rewards": torch.zeros(4)}, TrainingError, r"rewards have shape \(4,\)"),
        ({"rewards": torch.full((4, 2), math.inf)}, RewardError, "4 of 4 completions"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, error: type[Exception], message: str) -> None:
    given = {"rewards": torch.zeros(4, 2), "group": torch.zeros(4, dtype=torch.int64)} | changes
    with pytest.raises(error, match=message):
        group_advantages(given.pop("rewards"), **given)


def test_leave_one_out_compares_each_with_the_mean_of_the_others() -> None:
    """RLOO (arXiv 2402.14740, equation 6), row by row; groups interleave, and the last is alone in its own."""
    scores, group = [1.0, 3.0, 0.0, 5.0, NAN, 2.0], [0, 1, 0, 0, 0, 1]
    expected = []
    for i, (score, label) in enumerate(zip(scores, group, strict=True)):
        others = [s for j, s in enumerate(scores) if j != i and group[j] == label and not math.isnan(s)]
        expected.append(0.0 if math.isnan(score) else score - sum(others) / len(others))
    rewards = torch.tensor([[score] for score in [*scores, 7.0]], dtype=torch.float64)
    found = group_advantages(rewards, group=torch.tensor([*group, 2]), scale_rewards="none", baseline="leave_one_out")
    torch.testing.assert_close(found, torch.tensor([*expected, 0.0], dtype=torch.float64))


# --- baselines and scales of the literature, each by its authors' loop over rows --------------------------------------

REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.25, 0.0, 0.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
TOKENS = [3, 9, 4, 1, 2, 2, 5, 8, 6, 1, 7, 3]


def _advantages(**options: str) -> list[float]:
    rewards = torch.tensor(REWARDS, dtype=torch.float64).unsqueeze(1)
    lengths = torch.tensor(TOKENS)
    return group_advantages(rewards, group=torch.tensor(GROUPS), lengths=lengths, **options).tolist()


def _of_group(row: int, values: list[float] = REWARDS) -> list[float]:
    return [value for value, group in zip(values, GROUPS, strict=True) if group == GROUPS[row]]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _whitened(values: list[float]) -> list[float]:
    """verl's `masked_whiten` of values that are repeated for each token."""
    tokens = [value for value, length in zip(values, TOKENS, strict=True) for _ in range(length)]
    mean = _mean(tokens)
    variance = sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def test_maxrl_divides_by_the_pass_rate() -> None:
    """As `compute_maxrl_outcome_advantage` of the authors' verl."""
    expected = [(r - _mean(_of_group(i))) / (_mean(_of_group(i)) + 1e-6) for i, r in enumerate(REWARDS)]
    assert _advantages(scale_rewards="mean") == pytest.approx(expected, abs=1e-12)


def test_opo_weighs_its_baseline_by_length() -> None:
    """As `compute_opo_outcome_advantage` of verl."""
    baselines = [
        sum(length * reward for length, reward in zip(_of_group(i, TOKENS), _of_group(i), strict=True))  # type: ignore[arg-type]
        / sum(_of_group(i, TOKENS))  # type: ignore[arg-type]
        for i in range(len(REWARDS))
    ]
    expected = [reward - baseline for reward, baseline in zip(REWARDS, baselines, strict=True)]
    assert _advantages(baseline="length_weighted", scale_rewards="none") == pytest.approx(expected, abs=1e-12)


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    """As `compute_reinforce_plus_plus_outcome_advantage` of verl, and its variant with the group's mean."""
    assert _advantages(baseline="none", scale_rewards="tokens") == pytest.approx(_whitened(REWARDS), abs=1e-12)
    centered = [reward - _mean(_of_group(i)) for i, reward in enumerate(REWARDS)]
    assert _advantages(scale_rewards="tokens") == pytest.approx(_whitened(centered), abs=1e-12)


def test_gpg_makes_up_for_groups_that_tell_nothing() -> None:
    """TRL's `GPGTrainer`, eq. 7 of the paper: 8 of 12 completions are in groups whose rewards differ."""
    expected = [(reward - _mean(_of_group(i))) * 12 / 8 for i, reward in enumerate(REWARDS)]
    assert _advantages(scale_rewards="signal") == pytest.approx(expected, abs=1e-12)


def test_leave_one_out_of_several_rewards_is_that_of_trl_s_rloo() -> None:
    """`RLOOTrainer`: weighted rewards are summed without those that abstained, then each against the others' mean."""
    rewards = _rewards([[1.0, 2.0], [0.0, None], [None, None], [0.5, -1.0]])
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    advantages = group_advantages(
        rewards, group=torch.zeros(4, dtype=torch.int64), weights=weights, baseline="leave_one_out",
        scale_rewards="none",
    )  # fmt: skip
    total = [2.0, 0.0, 0.0]
    expected = [total[i] - (sum(total) - total[i]) / 2 for i in range(3)]
    assert advantages.tolist() == pytest.approx([expected[0], expected[1], 0.0, expected[2]], abs=1e-12)


def test_clipped_rewards_and_whitened_advantages_are_those_of_trl_s_rloo() -> None:
    """`RLOOTrainer`: the sum is clamped, then less beta·KL; nanmean and nanstd of A, in which a lone row is NaN."""
    rewards = _rewards([[3.0, 1.0], [0.0, None], [None, None], [-0.5, -9.0], [2.0, 0.0], [None, None]])
    penalty = torch.tensor([0.1, -0.2, 0.3, 0.0, 0.5, 0.0], dtype=torch.float64)
    found = group_advantages(
        rewards, group=torch.tensor([0, 0, 0, 0, 1, 1]), baseline="leave_one_out", scale_rewards="advantages",
        clip=(-1.0, 1.5), added=penalty,
    )  # fmt: skip
    total = [1.5 + 0.1, 0.0 - 0.2, -1.0]
    centered = [value - (sum(total) - value) / 2 for value in total]
    mean, std = _mean(centered), statistics.stdev(centered)
    expected = [(value - mean) / (std + 1e-4) for value in centered]
    assert found.tolist() == pytest.approx([expected[0], expected[1], 0.0, expected[2], 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("scale_rewards", ["mean", "tokens", "signal", "advantages"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "length_weighted"])
def test_what_no_function_judged_stays_outside_of_every_scale(baseline: str, scale_rewards: str) -> None:
    judged = _rewards([[1.0], [0.0], [0.0], [1.0]])
    more = _rewards([[1.0], [0.0], [None], [0.0], [1.0]])
    options = {"baseline": baseline, "scale_rewards": scale_rewards}
    without = group_advantages(
        judged, group=torch.zeros(4, dtype=torch.int64), lengths=torch.tensor([1, 2, 3, 4]), **options
    )
    with_it = group_advantages(
        more, group=torch.zeros(5, dtype=torch.int64), lengths=torch.tensor([1, 2, 99, 3, 4]), **options
    )
    factor = 5 / 4 if scale_rewards == "signal" else 1  # which makes up for completions without a judgement, too
    assert with_it[2] == 0
    torch.testing.assert_close(with_it[[0, 1, 3, 4]], factor * without)
