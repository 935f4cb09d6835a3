"""Presets: what each stands for, and that a key that is written wins."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.config.document import Document
from lachesis.config.load import validate
from lachesis.config.presets import PRESETS
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig

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


def test_what_is_written_wins_and_is_said():
    config = loaded(algorithm={"preset": "gspo", "epsilon": 0.1}, batch={"steps_per_generation": 2})
    assert (config.algorithm.epsilon, config.algorithm.epsilon_high) == (0.1, 4e-4)
    (said,) = [finding.message for finding in check(config) if finding.message.startswith("algorithm.preset")]
    assert said.endswith("written otherwise, and taken: algorithm.epsilon: 0.1, batch.steps_per_generation: 2")


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
