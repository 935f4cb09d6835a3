"""Which problems a run loads, to train on and to evaluate with, and the rewards of them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lachesis.plugins.sandbox.choice import VARIABLE
from lachesis.run.sources import build_reward_functions, build_stream, load_data, reward_workers, template_findings
from lachesis.train.model.loading import load_tokenizer

ENVIRONMENTS = {
    "source": {"kind": "atropos"},
    "engine": {"kind": "embedded_server"},
    "bridge": {"kind": "shared_vllm"},
}


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def texts(prompts: list[Any]) -> set[str]:
    return {prompt.columns["prompt"][:-2] for prompt in prompts}


def test_a_dataset_with_a_file_of_its_own_to_evaluate_with(config: Any):
    problems, held_out = load_data(config({"path": "train.jsonl", "eval_path": "test.jsonl"}))
    assert (len(problems), len(held_out)) == (10, 3)
    assert (texts(problems), texts(held_out)) == ({"train"}, {"test"})


def test_a_dataset_of_which_a_part_is_held_out(config: Any):
    problems, held_out = load_data(config({"path": "train.jsonl", "eval_size": 4}))
    assert (len(problems), len(held_out)) == (6, 4)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, 0),
        ({"path": "train.jsonl"}, 0),
        ({"eval_path": "test.jsonl"}, 3),
        ({"path": "train.jsonl", "eval_path": "test.jsonl"}, 3),
        ({"path": "train.jsonl", "eval_size": 4}, 4),
    ],
)
def test_environments_have_problems_of_their_own_and_the_held_out_ones_are_loaded(
    config: Any, data: dict[str, Any], expected: int
):
    problems, held_out = load_data(config(data, **ENVIRONMENTS))
    assert problems == []
    assert len(held_out) == expected


@pytest.mark.parametrize(("sandbox", "said"), [("auto", None), ("none", "none"), ("landlock", "landlock")])
def test_rewards_use_the_sandbox_of_the_configuration(config, monkeypatch: pytest.MonkeyPatch, sandbox, said):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    functions = ["grpo_code.code_execution_reward_func"]
    build_reward_functions(config({"path": "train.jsonl"}, rewards={"functions": functions, "sandbox": sandbox}))
    assert os.environ.get(VARIABLE) == said


def test_filter_and_order_are_those_of_the_configuration(config: Any):
    made = config({"path": "train.jsonl", "filter": {"prompt": ["train1=", "train7=", "train3="]}, "eval_size": 1})
    problems, held_out = load_data(made)
    assert (len(problems), len(held_out)) == (2, 1)
    problems, _ = load_data(config({"path": "train.jsonl"}))
    problems = [replace(problem, columns={"place": -index}) for index, problem in enumerate(problems)]
    found = build_stream(config({"path": "train.jsonl", "order": "place"}), problems).take(10)
    assert [prompt.text for prompt in found] == [f"train{i}=" for i in range(9, -1, -1)]


@pytest.mark.parametrize(
    ("conversations", "text_completions", "as_messages", "said"),
    [
        (None, "messages", True, "note: prompts are texts .* set data.conversations: false"),
        (None, "text", False, "warning: prompts are texts .*, which is not applied, .* data.conversations: true"),
        (True, "text", True, ""),
        (False, "messages", False, ""),
    ],
)
def test_texts_go_through_the_chat_template_unless_a_key_says_otherwise(
    config: Any, tmp_path: Path, conversations: bool | None, text_completions: str, as_messages: bool, said: str
):
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rewards = {"functions": ["a.b"], "text_completions": text_completions}
    built = config({"path": "train.jsonl", "conversations": conversations}, rewards=rewards)
    problems, _ = load_data(built)
    assert problems[0].text == ("<user>train0=<assistant>" if as_messages else "train0=")
    found = template_findings(built, problems, load_tokenizer(built.model))
    assert bool(found) == bool(said)
    if found:
        assert re.match(said, f"{found[0].level}: {found[0].message}")


def test_without_a_chat_template_a_text_is_continued(config: Any):
    built = config({"path": "train.jsonl"})
    problems, _ = load_data(built)
    assert problems[0].text == "train0=" and problems[0].messages is None
    assert template_findings(built, problems, load_tokenizer(built.model)) == []


@pytest.mark.parametrize(
    ("functions", "source", "wanted"),
    [
        (["mine.py:f", "theirs.g"], {}, None),
        ([{"function": "mine.py:f", "kwargs": {"a": 1}}], {"tools": ["tools.py:add"]}, None),
        (["mine.py:f"], {"tools": ["./mine.py:add"]}, 0),
        (["mine.f"], {"tools": ["mine.py:add"]}, 0),
    ],
)
def test_functions_that_may_share_memory_with_others_stay_in_this_process(
    config: Any, functions: list[Any], source: dict[str, Any], wanted: int | None
):
    made = config({"path": "train.jsonl"})
    rewards = made.rewards.model_copy(update={"functions": functions})
    sources = made.source.model_copy(update=source)
    assert reward_workers(made.model_copy(update={"rewards": rewards, "source": sources})) == wanted
    said = rewards.model_copy(update={"num_workers": 3})
    assert reward_workers(made.model_copy(update={"rewards": said, "source": sources})) == 3
