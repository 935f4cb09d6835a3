"""Losses and advantages by name against the numbers that other trainers' own code computes for them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch

from lachesis.config.presets import PRESETS
from lachesis.config.schema.training import PresetName
from lachesis.train.losses.advantage import group_advantages
from lachesis.train.losses.loss import policy_loss
from tests.losses import loss_options
from tests.paths import GOLDEN

RECORDED = json.loads((GOLDEN / "peer-losses.json").read_text(encoding="utf-8"))
FIXTURE = RECORDED["fixture"]
LOSSES = {case["name"]: case for case in RECORDED["losses"]}
ADVANTAGES = {case["name"]: case for case in RECORDED["advantages"]}

# The options of ours by the name of a recorded loss, each with the bounds of its recorded settings.
OURS: dict[str, dict[str, Any]] = {
    "dapo": {"preset": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 10.0},
    "dual clip": {"loss_type": "grpo", "delta": 1.4},
    "dr_grpo": {"preset": "dr_grpo", "delta": 10.0},
    "sequence sum": {"loss_type": "grpo", "normalization": "sequence_sum", "delta": 10.0},
    "gspo": {"preset": "gspo", "epsilon": 0.03, "epsilon_high": 0.04},
    "cispo": {"preset": "cispo", "epsilon_high": 1.2},  # of the ratio itself: 1 + 0.2
    "gmpo": {"preset": "gmpo", "epsilon": 0.3, "epsilon_high": 0.25},
    "dppo_tv": {"preset": "dppo_tv", "epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.5},
    "dppo_kl": {"preset": "dppo_kl", "epsilon": 0.02, "epsilon_high": 0.05, "delta": 1.5},
    "clip_cov": {
        "preset": "clip_cov",
        "cov_share": 0.5,
        "cov_low": 0.1,
        "cov_high": 1.5,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
    },
    "kl_cov": {"preset": "kl_cov", "cov_share": 0.3, "cov_kl_coef": 2.0},
    "gpg": {"preset": "gpg"},
    "sapo": {"loss_type": "sapo"},
    "openrlhf ppo": {"loss_type": "dapo", "epsilon_high": 0.27, "delta": 1.5},
    "openrlhf gspo": {"preset": "gspo", "epsilon": 0.03, "epsilon_high": 0.04},
    "decoupled ppo": {"preset": "decoupled_ppo"},
    "decoupled ppo, clamped": {
        "preset": "decoupled_ppo",
        "sampler_correction": "token_truncate",
        "sampler_correction_max": 2.0,
    },
}
# The presets whose formula is in their advantages, by the name of a recorded case.
OF_ADVANTAGES = {
    "rloo": "rloo",
    "opo": "opo",
    "maxrl": "maxrl",
    "gpg": "gpg",
    "dr_grpo": "dr_grpo",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++ baseline": "reinforce_plus_plus_baseline",
}


def of_preset(name: str) -> dict[str, Any]:
    """Return the keys of the section algorithm that a preset stands for."""
    keys = {path.partition(".")[::2]: value for path, value in PRESETS[name].items()}
    return {key: value for (section, key), value in keys.items() if section == "algorithm"}


def test_every_recorded_case_and_every_preset_is_compared():
    assert set(LOSSES) == set(OURS)
    assert set(ADVANTAGES) == set(OF_ADVANTAGES)
    named = {options["preset"] for options in OURS.values() if "preset" in options}
    assert named | set(OF_ADVANTAGES.values()) == set(get_args(PresetName))


@pytest.mark.parametrize("name", OURS)
def test_values_and_gradients_are_those_of_its_source(name: str):
    case, written = LOSSES[name], dict(OURS[name])
    preset = of_preset(written.pop("preset")) if "preset" in written else {}
    options = loss_options(**{"sampler_correction": "none", **preset, **written})
    logprobs, old, sampled = (
        torch.tensor([value for row in FIXTURE[key] for value in row], dtype=torch.float64)
        for key in ("logprobs", "old_logprobs", "sampler_logprobs")
    )
    logprobs.requires_grad_()
    output = policy_loss(
        logprobs,
        row=torch.tensor([row for row, length in enumerate(FIXTURE["lengths"]) for _ in range(length)]),
        mask=torch.ones_like(old),
        advantages=torch.tensor(FIXTURE["advantages"], dtype=torch.float64),
        old_logprobs=old,
        sampling_logprobs=sampled,
        num_sequences=len(FIXTURE["lengths"]),
        num_tokens=sum(FIXTURE["lengths"]),
        options=options,
        max_completion_length=FIXTURE["max_completion_length"],
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    expected = torch.tensor([value for row in case["gradient"] for value in row], dtype=torch.float64)
    # AReaL's weights are float32, and verl and OpenRLHF add 1e-8 to the counts that they divide by.
    assert float(output.loss.detach()) == pytest.approx(case["loss"], rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", OF_ADVANTAGES)
def test_advantages_are_those_of_its_source(name: str):
    keys = of_preset(OF_ADVANTAGES[name])
    found = group_advantages(
        torch.tensor(FIXTURE["rewards"], dtype=torch.float64).unsqueeze(1),
        group=torch.tensor(FIXTURE["groups"]),
        lengths=torch.tensor(FIXTURE["lengths"]),
        **{key: keys[key] for key in ("baseline", "scale_rewards") if key in keys},
    )
    # MaxRL's mean is of float32 in its authors' code; all others are computed in float64.
    assert found.tolist() == pytest.approx(ADVANTAGES[name]["advantages"], rel=1e-6, abs=1e-9)
