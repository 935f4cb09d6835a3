"""Algorithms by name: the keys that ``algorithm.preset`` stands for, with the paper or code that each is from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from lachesis.common.json_values import is_list, is_object
from lachesis.config.schema import LachesisConfig, SamplingConfig
from lachesis.config.schema.training import PresetName

_OVERLONG = "soft_overlong_punishment"

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv 2503.14476 and verl's recipe: clip-higher, token mean, dynamic sampling; the overlong punishment is below.
    "dapo": {
        "algorithm.loss_type": "dapo",
        "algorithm.epsilon": 0.2,
        "algorithm.epsilon_high": 0.28,
        "algorithm.beta": 0.0,
        "pipeline.refill_zero_signal": 10,
    },
    # arXiv 2503.20783
    "dr_grpo": {"algorithm.loss_type": "dr_grpo", "algorithm.scale_rewards": "none", "algorithm.beta": 0.0},
    # arXiv 2507.18071, section 5.1: four mini-batches of a generation
    "gspo": {
        "algorithm.loss_type": "grpo",
        "algorithm.importance_sampling_level": "sequence",
        "algorithm.epsilon": 3e-4,
        "algorithm.epsilon_high": 4e-4,
        "algorithm.beta": 0.0,
        "batch.steps_per_generation": 4,
    },
    # arXiv 2506.13585, with the bound of ScaleRL, arXiv 2510.13786
    "cispo": {"algorithm.loss_type": "cispo", "algorithm.epsilon_high": 5.0},
    # arXiv 2507.20673
    "gmpo": {"algorithm.loss_type": "gmpo", "algorithm.epsilon": 0.4},
    # arXiv 2602.04879, with the bounds of verl's examples/dppo_trainer
    "dppo_tv": {"algorithm.loss_type": "dppo_tv", "algorithm.epsilon": 0.15, "algorithm.delta": 20.0},
    "dppo_kl": {"algorithm.loss_type": "dppo_kl", "algorithm.epsilon": 0.05, "algorithm.delta": 20.0},
    # arXiv 2505.22617
    "clip_cov": {"algorithm.loss_type": "clip_cov", "algorithm.cov_share": 2e-4},
    "kl_cov": {"algorithm.loss_type": "kl_cov", "algorithm.cov_share": 2e-4},
    # arXiv 2402.14740, as in TRL's RLOOTrainer
    "rloo": {
        "algorithm.loss_type": "grpo",
        "algorithm.importance_sampling_level": "sequence_product",
        "algorithm.baseline": "leave_one_out",
        "algorithm.scale_rewards": "none",
    },
    # arXiv 2602.02710
    "maxrl": {"algorithm.loss_type": "dapo", "algorithm.scale_rewards": "mean"},
    # arXiv 2505.23585
    "opo": {
        "algorithm.loss_type": "dapo",
        "algorithm.baseline": "length_weighted",
        "algorithm.scale_rewards": "none",
    },
    # arXiv 2501.03262, and its variant with the group's mean
    "reinforce_plus_plus": {
        "algorithm.loss_type": "dapo",
        "algorithm.baseline": "none",
        "algorithm.scale_rewards": "tokens",
    },
    "reinforce_plus_plus_baseline": {"algorithm.loss_type": "dapo", "algorithm.scale_rewards": "tokens"},
    # arXiv 2504.02546
    "gpg": {"algorithm.loss_type": "reinforce", "algorithm.scale_rewards": "signal"},
    # arXiv 2505.24298, with the cap of AReaL's examples
    "decoupled_ppo": {
        "algorithm.loss_type": "dapo",
        "algorithm.sampler_correction": "token_mask",
        "algorithm.sampler_correction_max": 5.0,
    },
}
assert set(PRESETS) == set(get_args(PresetName))


def apply_preset(data: dict[str, Any]) -> None:
    """Write the keys of ``algorithm.preset`` into a configuration, but for those that it has."""
    algorithm = data.get("algorithm")
    name = algorithm.get("preset") if is_object(algorithm) else None
    if not isinstance(name, str) or name not in PRESETS:
        return  # what is no name of one is said when the schema is checked
    for path, value in PRESETS[name].items():
        section, _, key = path.partition(".")
        keys = data.setdefault(section, {})
        if is_object(keys):
            keys.setdefault(key, value)
    if name == "dapo":
        _punish_overlong(data)


def _punish_overlong(data: Mapping[str, Any]) -> None:
    """Append DAPO's punishment of the last fifth of the longest completion to the rewards, unless it is there."""
    rewards, sampling = data.get("rewards"), data.get("sampling")
    functions = rewards.get("functions") if is_object(rewards) else None
    if not is_object(rewards) or not is_list(functions) or _OVERLONG in str(functions):
        return
    default = SamplingConfig.model_fields["max_completion_length"].default
    longest = sampling.get("max_completion_length", default) if is_object(sampling) else default
    if not isinstance(longest, int):
        return
    kwargs = {"max_completion_len": longest, "soft_punish_cache": max(1, longest // 5)}
    functions.append({"function": _OVERLONG, "kwargs": kwargs})
    if is_list(weights := rewards.get("weights")):
        weights.append(1.0)


def preset_in_words(config: LachesisConfig) -> str:
    """Return what the preset of a configuration stands for, and what is written in its place."""
    name = config.algorithm.preset
    assert name is not None
    taken, other = list[str](), list[str]()
    for path, value in PRESETS[name].items():
        section, _, key = path.partition(".")
        found = getattr(getattr(config, section), key)
        (taken if found == value else other).append(f"{path}: {found}")
    taken += [f"rewards.functions: {_OVERLONG}"] if _OVERLONG in str(config.rewards.functions) else []
    stands = f"algorithm.preset {name} stands for {', '.join(taken) or 'nothing that is not written otherwise'}"
    return stands + (f"; written otherwise, and taken: {', '.join(other)}" if other else "")
