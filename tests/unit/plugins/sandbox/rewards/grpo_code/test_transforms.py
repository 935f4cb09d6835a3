from __future__ import annotations

import json

import pytest

from lachesis.common.errors import DataError
from lachesis.common.imports import load_function
from lachesis.plugins.sandbox.rewards.grpo_code.transforms import read_tests
from lachesis.rollouts.datasets import Dataset, load_problems
from tests.tiny import tiny_tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"


def load(tmp_path, name: str, *rows: dict):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_problems(
        Dataset(str(tmp_path / "a.jsonl"), transform=f"grpo_code.{name}"), tokenizer=tokenizer, base_dir=tmp_path
    )


@pytest.mark.parametrize(
    ("question", "answer"), [("instruction", "response"), ("input", "output"), ("problem", "solution")]
)
def test_the_documented_formats_ask_for_a_code_block(tmp_path, question, answer):
    row = {question: "Reverse a string", answer: "def f(s): ...", "difficulty": "easy", "tags": ["a"]}
    (prompt,) = load(tmp_path, "instruction_response_transform", row)
    assert prompt.text.startswith("[user]Reverse a string\n\nAnswer with Python code")
    assert prompt.columns["response"] == prompt.columns["answer"] == "def f(s): ..."
    assert (prompt.columns["difficulty"], prompt.columns["tags"]) == ("easy", ["a"])


def test_follow_ups_ask_for_one_too(tmp_path):
    row = {"instruction": "a", "response": "x = 1", "follow_up": "b", "follow_up_response": "x = 2"}
    first, second = load(tmp_path, "instruction_response_transform", row)
    assert second.text.startswith(first.text + "[assistant]x = 1\n[user]b\n\nAnswer with Python code")


def test_the_first_test_is_shown_and_all_are_kept(tmp_path):
    row = {"instruction": "Area", "response": "...", "test_cases": ["assert area(0) == 0", "assert area(1) > 3"]}
    (prompt,) = load(tmp_path, "instruction_response_with_tests_transform", row)
    assert "assert area(0) == 0\n\nAnswer with" in prompt.text
    assert "assert area(1)" not in prompt.text
    assert prompt.columns["test_cases"] == row["test_cases"]


@pytest.mark.parametrize("tests", [[], None, "", 3])
def test_a_row_without_tests_is_an_error_where_tests_are_asked_for(tmp_path, tests):
    row = {"instruction": "Area", "response": "...", "test_cases": tests}
    with pytest.raises(DataError, match=r"line 1: .*test_cases"):
        load(tmp_path, "instruction_response_with_tests_transform", row)


def test_a_row_without_a_question_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"line 1: .*KeyError: 'instruction'"):
        load(tmp_path, "instruction_response_transform", {"question": "a"})


@pytest.mark.parametrize(
    ("value", "tests"), [(None, []), ("", []), ('["a", "b"]', ["a", "b"]), ("assert x", ["assert x"]), (["a"], ["a"])]
)
def test_tests_may_be_written_in_several_ways(value, tests):
    assert read_tests(value) == tests


@pytest.mark.parametrize("value", [3, {"a": 1}, [1], "[1]", "[broken"])
def test_other_things_are_no_tests(value):
    with pytest.raises(ValueError):
        read_tests(value)


def test_rows_of_acecode_ask_for_an_answer_in_marks():
    row_function, options = load_function("grpo_code.axolotl_acecode_transform")({})
    made = row_function({"question": "Add.", "test_cases": ["assert add(1, 1) == 2"]})
    assert made["prompt"][0]["content"].startswith("Add.\n\n") and "<answer>" in made["prompt"][0]["content"]
    assert (made["answers"], options) == (["assert add(1, 1) == 2"], {"remove_columns": ["question", "test_cases"]})
