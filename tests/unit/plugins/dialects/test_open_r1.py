"""Recipes of open-r1 and its forks: rewards that their scripts hold."""

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
REWARDS = """\
from .helpers import x

def cewe(completions, **kwargs):
    return [1.0 for _ in completions]

def get_reward_funcs(script_args):
    REWARD_FUNCS_REGISTRY = {
        "accuracy": accuracy_reward,
        "cewe": cewe,
        "made": get_made(script_args.made_size),
    }
    return [REWARD_FUNCS_REGISTRY[name] for name in script_args.reward_funcs]
"""
SCRIPT = """\
@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy", "cewe"], metadata={"help": "names"}
    )
"""


@pytest.fixture
def checkout(tmp_path):
    """A fork with a registry; writes a recipe into it."""
    package = tmp_path / "src" / "open_r1"
    package.mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    (package / "rewards.py").write_text(REWARDS)

    def write(text: str):
        file = tmp_path / "recipes" / "model" / "grpo" / "config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


def test_a_name_of_a_forks_registry_is_its_function(checkout, tmp_path):
    loaded = load_config(checkout(RECIPE + "reward_funcs: [accuracy, cewe]\n"))
    assert loaded.config.rewards.functions == ["accuracy", f"{tmp_path}/src/open_r1/rewards.py:cewe"]
    assert any("cewe is cewe of src/open_r1/rewards.py" in finding.message for finding in loaded.findings)


def test_what_a_registry_makes_has_to_be_written(checkout):
    with pytest.raises(
        ConfigError, match=r"made is made with arguments where it is registered; write FILE\.py:FACTORY"
    ):
        load_config(checkout(RECIPE + "reward_funcs: [made]\n"))


def test_a_recipe_without_rewards_has_those_of_its_script(checkout, tmp_path):
    file = checkout(RECIPE)
    (tmp_path / "src" / "open_r1" / "configs.py").write_text(SCRIPT)
    loaded = load_config(file)
    assert loaded.config.rewards.functions == ["accuracy", f"{tmp_path}/src/open_r1/rewards.py:cewe"]
    assert any("the default of src/open_r1/configs.py is accuracy, cewe" in one.message for one in loaded.findings)


def test_scripts_that_differ_decide_nothing(checkout, tmp_path):
    file = checkout(RECIPE)
    (tmp_path / "src" / "open_r1" / "configs.py").write_text(SCRIPT)
    (tmp_path / "src" / "grpo.py").write_text(SCRIPT.replace('"accuracy", ', ""))
    with pytest.raises(ConfigError, match="its scripts have several defaults"):
        load_config(file)


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
    with pytest.raises(ConfigError, match=rf"reward_funcs.*{name} asks Piston servers"):
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
