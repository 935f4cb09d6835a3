from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from lachesis.config.explain import explain
from lachesis.errors import ConfigError


@dataclass(frozen=True)
class Table:
    name: str
    paths: Mapping[str, str]


TRAINER = Table("trainer", {"lr": "optimizer.learning_rate", "group-size": "sampling.num_generations"})


def test_a_full_path():
    answer = explain("sampling.temperature")
    assert answer.meaning == "key"
    (found,) = answer.explanations
    assert (found.key, found.path, found.section) == (
        "sampling.temperature",
        "sampling.temperature",
        "sampling",
    )
    assert (found.type, found.default) == ("number > 0", "1.0")
    assert found.description == "Sampling temperature."


@pytest.mark.parametrize("name", ["learning_rate", "--learning-rate", " learning-rate "])
def test_a_bare_name_that_one_key_has(name):
    answer = explain(name)
    assert answer.meaning == "key"
    assert answer.explanations[0].path == "optimizer.learning_rate"


def test_a_required_key_has_no_default():
    assert explain("steps").explanations[0].default is None


def test_the_end_of_a_path_is_enough():
    assert explain("wandb.name").explanations[0].path == "logging.wandb.name"


def test_an_ambiguous_name_lists_all():
    answer = explain("every_steps")
    assert answer.meaning == "several"
    assert [found.section for found in answer.explanations] == ["evaluation", "checkpoint", "logging"]


def test_a_section_lists_its_keys_and_those_of_sections_in_it():
    answer = explain("logging")
    assert answer.meaning == "section"
    assert answer.description == "What is written while the run goes on."
    paths = [found.path for found in answer.explanations]
    assert "logging.tape" in paths and "logging.wandb.project" in paths
    assert all(path.startswith("logging.") for path in paths)


def test_a_nested_section_by_its_name():
    answer = explain("wandb")
    assert answer.meaning == "section"
    assert {found.section for found in answer.explanations} == {"logging.wandb"}


def test_keys_of_a_variant_say_so():
    assert explain("alpha").explanations[0].kinds == ("lora",)


@pytest.mark.parametrize("name", ["lr", "--lr"])
def test_a_name_of_a_dialect(name):
    (found,) = explain(name, dialects=[TRAINER]).explanations
    assert (found.path, found.dialect) == ("optimizer.learning_rate", "trainer")


def test_dashes_in_a_dialect_are_underscores():
    (found,) = explain("--group_size", dialects=[TRAINER]).explanations
    assert found.path == "sampling.num_generations"


def test_a_name_that_is_ours_and_a_dialects_lists_both():
    other = Table("other", {"temperature": "evaluation.temperature"})
    answer = explain("temperature", dialects=[other])
    assert [(found.path, found.dialect) for found in answer.explanations] == [
        ("sampling.temperature", ""),
        ("evaluation.temperature", ""),
        ("evaluation.temperature", "other"),
    ]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("learnin_rate", "did you mean optimizer.learning_rate?"),
        ("sampling.temprature", "did you mean sampling.temperature?"),
        ("groupsize", "did you mean group_size?"),
        ("qqqqq", "the sections are run, model, adapter"),
        ("", "the sections are run, model, adapter"),
    ],
)
def test_an_unknown_name(name, remedy):
    with pytest.raises(ConfigError) as caught:
        explain(name, dialects=[TRAINER])
    assert remedy in caught.value.remedy
    assert caught.value.message == f"no key is called {name!r}"
