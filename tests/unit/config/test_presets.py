"""Presets: what each stands for, and that a key that is written wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis.config.document import Document
from lachesis.config.load import load_document, validate
from lachesis.config.presets import PRESETS
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.dialects import verl

DEFAULTS = {
    name: field.get_default(call_default_factory=True).model_dump()
    for name, field in LachesisConfig.model_fields.items()
    if name in ("algorithm", "pipeline", "batch")
}
MINIMAL = {"model": {"path": "m"}, "data": {"path": "d"}, "run": {"steps": 8}}


def loaded(**sections: Any) -> LachesisConfig:
    sections.setdefault("rewards", {"functions": ["accuracy_reward"]})
    return validate(Document("c.yaml", {**MINIMAL, **sections}))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_keys_and_has_no_problem(name: str):
    config = loaded(algorithm={"preset": name})
    for path, value in PRESETS[name].items():
        section, _, key = path.partition(".")
        assert getattr(getattr(config, section), key) == value
    assert not [finding for finding in check(config) if finding.level == "problem"]
    (said,) = [finding.message for finding in check(config) if finding.message.startswith("algorithm.preset")]
    assert all(f"{path}: {value}" in said for path, value in PRESETS[name].items())


# What the authors' scripts for verl, or verl's examples, set.
SCRIPTS = {
    "dapo": "clip_ratio_low: 0.2, clip_ratio_high: 0.28, loss_agg_mode: token-mean",
    "gspo": "policy_loss: {loss_mode: gspo}, clip_ratio_low: 3.0e-4, clip_ratio_high: 4.0e-4",
    "gmpo": "policy_loss: {loss_mode: geo_mean}, clip_ratio_low: 0.4, clip_ratio_high: 0.4",
    "dppo_tv": "policy_loss: {loss_mode: dppo_tv}, clip_ratio_low: 0.15, clip_ratio_high: 0.15, clip_ratio_c: 20.0",
    "dppo_kl": "policy_loss: {loss_mode: dppo_kl}, clip_ratio_low: 0.05, clip_ratio_high: 0.05, clip_ratio_c: 20.0",
    "clip_cov": "policy_loss: {loss_mode: clip_cov, clip_cov_ratio: 0.0002, clip_cov_lb: 1.0, clip_cov_ub: 5.0}, "
    "clip_ratio_low: 1.0, clip_ratio_high: 1.0",
    "kl_cov": "policy_loss: {loss_mode: kl_cov, kl_cov_ratio: 0.002, ppo_kl_coef: 1.0}",
    "dr_grpo": "loss_agg_mode: seq-mean-token-sum-norm",
    "opo": "",
    "reinforce_plus_plus": "",
    "reinforce_plus_plus_baseline": "",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_preset_is_what_its_script_for_verl_becomes(name: str):
    estimator = name if name.startswith(("opo", "reinforce")) else "grpo"
    algorithm: dict[str, Any] = {"adv_estimator": estimator, "norm_adv_by_std_in_grpo": name != "dr_grpo"}
    if name == "dapo":
        algorithm["filter_groups"] = {"enable": True, "max_num_gen_batches": 10}
    data = {"train_batch_size": 512, "train_files": "d"}
    actor = yaml.safe_load(f"{{{SCRIPTS[name]}}}") | {"ppo_mini_batch_size": 128 if name == "gspo" else 512}
    document = Document("c", {"algorithm": algorithm, "data": data, "actor_rollout_ref": {"actor": actor}})
    theirs = verl.translate(document).document.data
    ours = loaded(algorithm={"preset": name})
    paths = {*PRESETS[name], *(f"algorithm.{key}" for key in theirs["algorithm"])}
    # verl bounds ratios that are not clipped by 3 where nothing else is written, and says the mean of the loss again.
    paths -= {"algorithm.normalization", *({"algorithm.delta"} - PRESETS[name].keys())}
    for path in sorted(paths):
        section, _, key = path.partition(".")
        own = ours.algorithm.upper_epsilon if key == "epsilon_high" else getattr(getattr(ours, section), key)
        assert theirs.get(section, {}).get(key, DEFAULTS[section].get(key)) == own, path


def test_the_preset_of_rloo_is_that_of_trl():
    file = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a.b"], "trl_trainer": "rloo"}
    trl = load_document(Document("c.yaml", file), base_dir=Path("/")).config.algorithm
    ours = loaded(algorithm={"preset": "rloo"}).algorithm
    same = {"router_aux_loss_coef": "model", "preset": "rloo"}
    assert trl.model_copy(update=same) == ours.model_copy(update=same)


def test_what_is_written_wins_and_is_said():
    config = loaded(algorithm={"preset": "gspo", "epsilon": 0.1}, batch={"steps_per_generation": 2})
    assert (config.algorithm.epsilon, config.algorithm.epsilon_high) == (0.1, 4e-4)
    (said,) = [finding.message for finding in check(config) if finding.message.startswith("algorithm.preset")]
    assert said.endswith("overridden by the configuration: algorithm.epsilon: 0.1, batch.steps_per_generation: 2")


def test_dapo_punishes_the_last_fifth_of_a_completion_once():
    rewards = {"functions": ["accuracy_reward"], "weights": [2.0]}
    config = loaded(algorithm={"preset": "dapo"}, sampling={"max_completion_length": 1000}, rewards=rewards)
    overlong = {
        "function": "soft_overlong_punishment",
        "kwargs": {"max_completion_len": 1000, "soft_punish_cache": 200},
    }
    assert config.rewards.functions == ["accuracy_reward", overlong]
    assert config.rewards.weights == [2.0, 1.0]
    again = validate(Document("c.yaml", config.model_dump(mode="json")))
    assert again == config


def test_no_preset_writes_nothing():
    assert loaded().algorithm == LachesisConfig.model_fields["algorithm"].get_default(call_default_factory=True)
