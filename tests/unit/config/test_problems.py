"""What is wrong is said in the lines and the names of the user's own file, whoever's keys it is in."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.document import parse_document
from lachesis.config.load import load_argv, load_config
from lachesis.config.overrides import apply_overrides
from lachesis.config.rules import check
from lachesis.plugins.dialects.axolotl import AXOLOTL
from lachesis.plugins.dialects.table import Dialect, Translation
from lachesis.plugins.dialects.trl import TRL

OURS = """\
run: {steps: 4}
model: {path: org/model}
data:
  path: train.jsonl
rewards:
  functions: [rewards.exact]
  weights: [1, 2]
"""
AXOLOTLS = """\
base_model: org/model
rl: grpo
micro_batch_size: 4
datasets:
  - path: org/data
trl:
  num_generations: 4
  reward_funcs: [rewards.exact]
  reward_weights: [1, 2]
"""
TRLS = """\
model_name_or_path: org/model
dataset_name: org/data
num_generations: 8
reward_funcs: [rewards.exact]
reward_weights: [1, 2]
"""


def said(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded = load_config(path, overrides=overrides)
        check(loaded.config, located=loaded.located)
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "without", "expected"),
    [
        (OURS, "  functions: [rewards.exact]\n", "rewards.functions (line 5): missing, but required"),
        (OURS, "  path: train.jsonl\n", "data.path (line 3): missing, but required"),
        (OURS, "model: {path: org/model}\n", "model.path: missing, but required"),
        (AXOLOTLS, "  reward_funcs: [rewards.exact]\n", "trl.reward_funcs (line 6): missing, but required (here "),
        (AXOLOTLS, "datasets:\n  - path: org/data\n", "Axolotl's datasets.path: missing, but required (here data.path"),
        (AXOLOTLS, "base_model: org/model\n", "Axolotl's base_model: missing, but required (here model.path)"),
        (TRLS, "reward_funcs: [rewards.exact]\n", "TRL's reward_funcs: missing, but required (here rewards.functions)"),
        (TRLS, "dataset_name: org/data\n", "TRL's dataset_name: missing, but required (here data.path)"),
        (TRLS, "model_name_or_path: org/model\n", "TRL's model_name_or_path: missing, but required (here model.path)"),
    ],
)
def test_a_missing_key_is_named_as_the_file_writes_it(write, text, without, expected):
    assert without in text
    assert expected in said(write(text.replace(without, "")))


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (OURS, (), "rewards.weights (line 7) has 2 values for 1 rewards.functions (line 6)"),
        (OURS, ("rewards.weights=[1, 2, 3]",), "rewards.weights (--set rewards.weights) has 3 values for 1 "),
        (
            AXOLOTLS,
            (),
            "rewards.weights (line 9: trl.reward_weights) has 2 values for 1 rewards.functions (line 8",
        ),
        (
            TRLS,
            (),
            "rewards.weights (line 5: reward_weights) has 2 values for 1 rewards.functions (line 4: ",
        ),
        (TRLS, ("reward_weights=[1, 2, 3]",), "rewards.weights (--set reward_weights) has 3 values"),
        (TRLS, ("reward_weights=null", "reward_funcs=[x y]"), "rewards.functions[0] (--set reward_funcs): 'x y' is"),
        (
            TRLS,
            ("reward_weights=null", "adam_beta1=0.5", "generation_kwargs={min_tokens: 9999}"),
            "sampling.min_tokens (--set generation_kwargs) 9999 is more than max_completion_length",
        ),
    ],
)
def test_a_rule_across_sections_names_lines_and_keys_of_the_file(write, text, overrides, expected):
    assert expected in said(write(text), *overrides)


def test_a_rule_names_the_flags():
    loaded = load_argv(["--model-name", "org/model", "--lr", "1e-5", "--warmup-steps", "5", "--training-steps", "3"])
    text = loaded.located("optimizer.warmup_steps is more than run.steps; optimizer.warmup_steps twice, x.py:run.steps")
    assert text == (
        "optimizer.warmup_steps (--warmup-steps) is more than run.steps (--training-steps); optimizer.warmup_steps "
        "twice, x.py:run.steps"
    )


def test_a_key_that_the_file_does_not_write_is_named_in_its_words(write):
    loaded = load_config(write(TRLS), overrides=["reward_weights=null"])
    assert loaded.located("set rewards.weights") == "set rewards.weights (TRL's reward_weights)"
    assert loaded.located("run.steps of a/run.steps and no.such key") == (
        "run.steps (TRL's max_steps) of a/run.steps and no.such key"
    )


@pytest.mark.parametrize("dialect", [AXOLOTL, TRL], ids=["axolotl", "trl"])
def test_set_takes_each_key_of_a_dialect(dialect: Dialect):
    for name in dialect.entries:
        document = parse_document("seed: 1", name="c.yaml")
        apply_overrides(document, [f"{name}=1"], row_sections=dialect.row_sections)
        translation = Translation(document, dialect)
        unknown = [one for one in (*document.problems, *translation.document.problems) if "not a key of" in one]
        assert not document.problems and not unknown, name


@pytest.mark.parametrize(
    ("text", "override", "section", "key", "value"),
    [
        (AXOLOTLS, "datasets.path=org/other", "data", "path", "org/other"),
        (AXOLOTLS, "datasets[0].split=test", "data", "split", "test"),
        (AXOLOTLS, "datasets.0.name=main", "data", "name", "main"),
        (AXOLOTLS, "test_datasets.path=org/held", "data", "eval_path", "org/held"),
        (AXOLOTLS, "trl.reward_funcs[0]=rewards.other", "rewards", "functions", ["rewards.other"]),
        (AXOLOTLS, "rewards.functions.0=rewards.other", "rewards", "functions", ["rewards.other"]),
        (TRLS, "datasets.split=test", "data", "split", "test"),
        (TRLS, "reward_funcs.0=rewards.other", "rewards", "functions", ["rewards.other"]),
        (OURS, "rewards.functions[0]=rewards.other", "rewards", "functions", ["rewards.other"]),
        (OURS, "data.chat_template_kwargs.a=1", "data", "chat_template_kwargs", {"a": 1}),
    ],
)
def test_set_reaches_lists_and_nested_keys_in_each_dialect(write, text, override, section, key, value):
    config = load_config(write(text), overrides=[override]).config
    assert getattr(getattr(config, section), key) == value


def test_a_key_that_is_set_by_both_names_is_refused(write):
    with pytest.raises(ConfigError, match=r"--set algorithm\.beta: --set beta sets it too; give one of them"):
        load_config(write(TRLS), overrides=["algorithm.beta=0.1", "beta=0.2"])
    assert load_config(write(TRLS), overrides=["algorithm.beta=0.1", "algorithm.beta=0.2"]).config.algorithm.beta == 0.2


def test_a_key_of_nobody_can_be_left_out(write):
    path = write(TRLS.replace("reward_weights: [1, 2]", "advantage: ranked"))
    assert "advantage (line 5): not a key of TRL that Lachesis knows" in said(path)
    assert "--set advantage=null trains without its effect there" in said(path)
    assert load_config(path, overrides=["advantage=null"]).config.model.path == "org/model"
