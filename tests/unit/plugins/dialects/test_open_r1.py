"""Recipes of open-r1: rewards of its registry, and its default."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_config

RECIPE = """\
model_name_or_path: org/model
dataset_name: org/data
num_generations: 8
per_device_train_batch_size: 8
"""


def test_a_recipe_of_open_r1_has_its_default(write):
    loaded = load_config(write(RECIPE + "system_prompt: Think.\n"))
    assert loaded.config.rewards.functions == ["accuracy", "format", "tag_count"]
    assert [one.level for one in loaded.findings if "open-r1's script" in one.message] == ["warning"]


@pytest.mark.parametrize("text", [RECIPE, RECIPE.replace("dataset_name", "dataset_id_or_path") + "system_prompt: x\n"])
def test_a_file_of_another_script_has_to_name_them(write, text):
    with pytest.raises(ConfigError, match="TRL's reward_funcs: missing"):
        load_config(write(text))


@pytest.mark.parametrize("name", ["ioi_code", "cf_code"])
def test_judges_on_servers_are_refused(write, name: str):
    with pytest.raises(ConfigError, match=rf"reward_funcs.*{name} needs Piston servers"):
        load_config(write(RECIPE + f"reward_funcs: [accuracy, {name}]\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max_new_tokens: 99", 99), ("max_new_tokens: 99\nmax_completion_length: 99", 99)],
)
def test_the_other_name_of_the_longest_completion(write, text, expected):
    config = load_config(write(f"{RECIPE}reward_funcs: [accuracy]\n{text}\n")).config
    assert config.sampling.max_completion_length == expected


def test_two_longest_completions_are_refused(write):
    with pytest.raises(ConfigError, match=r"max_new_tokens .*: 98, and max_completion_length is 99"):
        load_config(write(f"{RECIPE}reward_funcs: [accuracy]\nmax_new_tokens: 98\nmax_completion_length: 99\n"))


def test_another_dataset_for_evaluation(write):
    text = f"{RECIPE}reward_funcs: [accuracy]\neval_dataset_name: org/held\n"
    assert load_config(write(f"{text}eval_strategy: steps\n")).config.data.eval_path == "org/held"
    assert load_config(write(text)).config.data.eval_path is None
