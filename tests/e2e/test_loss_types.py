"""Every loss, and every correction and mask, learns the task that plain GRPO learns, and about as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from tests.e2e.runs import metrics, rewards, run_here, write_run

LAST = 5
Steps = list[dict[str, float]]


class Case(NamedTuple):
    """Keys of the algorithm, and what shows in the metrics that they were obeyed."""

    algorithm: dict[str, Any]
    shows: Callable[[Steps], bool]


def has(name: str) -> Callable[[Steps], bool]:
    return lambda steps: all(name in values for values in steps)


def lacks(name: str) -> Callable[[Steps], bool]:
    return lambda steps: not any(name in values for values in steps)


def drifts(steps: Steps) -> bool:
    """The second use of each batch is off-policy, and of the same rollouts."""
    first, second = steps[::2], steps[1::2]
    same = all(a["reward"] == b["reward"] for a, b in zip(first, second, strict=True))
    return same and max(a["mean_kl"] for a in first) < 1e-6 < 1e-4 < max(b["mean_kl"] for b in second)


def trains_on_fewer(steps: Steps) -> bool:
    return any(v["tokens_trained"] < v["tokens_generated"] for v in steps)


CLIPS = has("clip_fraction_low")
LOSSES = {
    "bnpo": Case({"loss_type": "bnpo"}, CLIPS),
    "dr_grpo": Case({"loss_type": "dr_grpo"}, CLIPS),
    "dapo": Case({"loss_type": "dapo", "epsilon_high": 0.28}, CLIPS),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0}, lacks("clip_fraction_low")),
    "sapo": Case({"loss_type": "sapo"}, lacks("clipped_fraction")),
    "luspo": Case({"loss_type": "luspo", "importance_sampling_level": "sequence"}, CLIPS),
    "vespo": Case({"loss_type": "vespo"}, has("vespo_weight")),
    "gspo": Case({"importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 4e-3}, CLIPS),
}
OPTIONS = {
    "two uses of each batch": Case({"num_iterations": 2, "delta": 4.0}, drifts),
    "sampler correction": Case(
        {"sampler_correction": "token_truncate", "off_policy_mask_threshold": 0.5}, has("sampling_ratio")
    ),
    "masked sequences": Case(
        {"loss_type": "dapo", "sampler_correction": "sequence_mask", "mask_truncated": True}, trains_on_fewer
    ),
    "high entropy tokens": Case(
        {"loss_type": "dapo", "top_entropy_quantile": 0.5, "entropy_coef": 0.001},
        lambda steps: all(values["skipped_zero_advantage"] == 0 for values in steps),
    ),
    "kl to an average": Case(
        {"beta": 0.01, "kl_reference": "ema", "ref_mixup_alpha": 1.0, "ref_sync_steps": 1},
        lambda steps: all(abs(values["kl_reference"]) < 1e-6 for values in steps),
    ),
    "kl to the sampler": Case(
        {"beta": 0.01, "kl_reference": "sampler", "num_iterations": 2},
        lambda steps: max(abs(values["kl_reference"]) for values in steps[::2]) < 1e-4 and drifts(steps),
    ),
}


def final_reward(directory: Path, case: Case) -> float:
    summary = run_here(write_run(directory, algorithm=case.algorithm))
    assert summary.finished
    found = rewards(summary.run_dir)
    steps = [dict(line.values) for line in metrics(summary.run_dir).steps]
    assert fmean(found[:3]) < 0.5, "there was nothing to learn"
    assert all(math.isfinite(values["loss"]) for values in steps)
    assert case.shows(steps), "the options were not obeyed"
    return fmean(found[-LAST:])


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> float:
    return final_reward(tmp_path_factory.mktemp("grpo"), Case({"loss_type": "grpo"}, CLIPS))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_reaches_what_grpo_reaches(tmp_path: Path, grpo: float, name: str):
    assert final_reward(tmp_path, LOSSES[name]) >= 0.9 * grpo > 0.7


@pytest.mark.parametrize("name", OPTIONS)
def test_so_does_every_option(tmp_path: Path, grpo: float, name: str):
    assert final_reward(tmp_path, OPTIONS[name]) >= 0.9 * grpo


def test_so_does_a_loss_of_ones_own(tmp_path: Path, grpo: float):
    path = tmp_path / "own_loss.py"
    path.write_text(
        "def reinforce(logprobs, *, advantages, ratio, **rest):\n"
        "    return -ratio.detach().clamp(max=2) * advantages * logprobs\n"
    )
    case = Case({"loss": f"{path}:reinforce"}, lacks("clipped_fraction"))
    assert final_reward(tmp_path, case) >= 0.9 * grpo
