from __future__ import annotations

import logging
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DataError
from lachesis.rollouts.datasets.formats import Problem, detect_format, to_problems
from lachesis.rollouts.datasets.rows import Row


def made(columns: dict[str, Any], data_format: Any, *, system: str | None = None) -> list[Problem]:
    return to_problems(
        Row("file, line 7", columns),
        data_format=data_format,
        prompt_column="prompt",
        conversation=True,
        system_prompt=system,
    )


class TestDetection:
    @pytest.mark.parametrize(
        ("columns", "found"),
        [
            (["prompt", "answer"], "prompt"),
            (["prompt", "instruction", "response"], "prompt"),
            (["instruction", "response", "test_cases"], "instruction_response"),
            (["input", "output"], "input_output"),
            (["problem", "solution", "difficulty"], "problem_solution"),
            (["messages"], "messages"),
            (["conversations", "id"], "messages"),
            (["conversations", "problem", "solution"], "problem_solution"),
            (["question", "answer"], "question_answer"),
            (["question", "answer", "problem", "solution"], "problem_solution"),
            (["question", "answer", "messages"], "messages"),
        ],
    )
    def test_the_columns_tell(self, columns, found, caplog):
        caplog.set_level(logging.INFO)
        assert detect_format(columns, prompt_column="prompt", dataset="mine.jsonl") == found
        assert f"mine.jsonl: format {found}" in caplog.text

    def test_a_named_prompt_column_is_the_prompt(self):
        assert detect_format(["q", "input", "output"], prompt_column="q") == "prompt"
        assert detect_format(["input", "output"], prompt_column="q") == "prompt"

    @pytest.mark.parametrize(
        "columns",
        [
            ["instruction", "response", "input", "output"],
            ["instruction", "input", "output"],
            ["messages", "problem", "solution"],
        ],
    )
    def test_columns_that_fit_several_are_not_guessed_at(self, columns):
        with pytest.raises(DataError, match="several ways") as caught:
            detect_format(columns, prompt_column="prompt")
        assert "data.format" in caught.value.remedy

    def test_a_format_that_is_asked_for_holds(self):
        wanted = detect_format(["instruction", "input", "output"], prompt_column="prompt", wanted="input_output")
        assert wanted == "input_output"
        with pytest.raises(ConfigError, match="alpaca"):
            detect_format(["prompt"], prompt_column="prompt", wanted="alpaca")


class TestPairs:
    @pytest.mark.parametrize(
        ("data_format", "question", "answer"),
        [
            ("instruction_response", "instruction", "response"),
            ("input_output", "input", "output"),
            ("problem_solution", "problem", "solution"),
        ],
    )
    def test_all_columns_are_kept_and_the_answer_has_its_common_name(self, data_format, question, answer):
        (problem,) = made({question: "why", answer: "so", "tags": ["a"]}, data_format)
        assert problem.prompt == [{"role": "user", "content": "why"}]
        assert problem.columns == {question: "why", answer: "so", "tags": ["a"], "answer": "so"}

    def test_gsm8k_has_its_answer_where_the_shipped_rewards_look(self):
        (problem,) = made({"question": "1+2?", "answer": "<<1+2=3>>\n#### 3"}, "question_answer")
        assert problem.prompt == [{"role": "user", "content": "1+2?"}]
        assert problem.columns["answer"] == problem.columns["solution"] == "<<1+2=3>>\n#### 3"

    def test_a_column_called_answer_is_left_alone(self):
        (problem,) = made({"problem": "1+2", "solution": "think: 3", "answer": "3"}, "problem_solution")
        assert problem.columns["answer"] == "3"

    @pytest.mark.parametrize(
        ("value", "what"), [(None, "empty or missing"), (" ", "empty"), (3, "is a number, not text"), ([], "empty")]
    )
    def test_a_question_that_is_none(self, value, what):
        with pytest.raises(DataError, match=f"line 7: column 'input' .*{what}"):
            made({"input": value, "output": "x"}, "input_output")

    def test_tests_of_the_first_question_are_not_those_of_the_second(self):
        row = {"instruction": "a", "response": "b", "follow_up": "c", "follow_up_response": "d", "test_cases": ["t"]}
        first, second = made(row, "instruction_response")
        assert (first.turn, first.columns["test_cases"]) == (0, ["t"])
        assert (second.turn, second.columns["test_cases"]) == (1, None)
        (_, second) = made(row | {"follow_up_test_cases": ["u"]}, "instruction_response")
        assert second.columns["test_cases"] == ["u"]

    def test_a_follow_up_needs_the_first_answer(self):
        with pytest.raises(DataError, match="column 'response' is empty"):
            made({"instruction": "a", "response": None, "follow_up": "c"}, "instruction_response")


class TestMessages:
    USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}

    def test_the_last_answer_is_what_is_asked_for(self):
        (problem,) = made({"messages": [self.USER, self.REPLY, self.USER, self.REPLY]}, "messages")
        assert problem.prompt == [self.USER, self.REPLY, self.USER]
        assert (problem.columns["response"], problem.columns["answer"]) == ("a", "a")

    @pytest.mark.parametrize("column", ["conversations", "messages"])
    def test_sharegpts_turns_are_messages(self, column):
        turns = [("system", "s"), ("human", "q"), ("gpt", "a")]
        columns = {column: [{"from": who, "value": text} for who, text in turns]}
        (problem,) = made(columns, "messages")
        assert problem.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
        assert problem.columns["answer"] == "a" and problem.column == column
        assert made({"prompt": columns[column][:2]}, "prompt")[0].prompt == problem.prompt

    def test_messages_that_end_with_the_user_are_the_prompt(self):
        (problem,) = made({"messages": [self.USER], "answer": "x"}, "messages", system="s")
        assert problem.prompt == [{"role": "system", "content": "s"}, self.USER]
        assert problem.columns["answer"] == "x"

    def test_what_is_none_is_left_to_be_refused(self):
        assert made({"messages": "q"}, "messages")[0].prompt == "q"
        assert made({"messages": None}, "messages", system="s")[0].prompt is None


def test_a_text_in_the_prompts_column_may_be_a_users_message():
    row = Row("f line 1", {"prompt": "2 + 2?"})
    options = {"data_format": "prompt", "prompt_column": "prompt", "conversation": False, "system_prompt": None}
    (text,) = to_problems(row, **options)
    (message,) = to_problems(row, conversations=True, **options)
    assert (text.prompt, message.prompt) == ("2 + 2?", [{"role": "user", "content": "2 + 2?"}])


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"prompt": "What is it?", "images": [{"bytes": b"PNG", "path": None}]}, "'images'"),
        ({"prompt": "What is it?", "image": {"bytes": b"PNG"}}, "'image'"),
        ({"prompt": "What is it?", "image": "shapes/a.png"}, "'image'"),
        ({"prompt": "What is it?", "image_2": "data:image/png;base64,AAAA"}, "'image_2'"),
        ({"prompt": "What is it?", "decoded": {"bytes": None, "path": "a.jpg"}}, "'decoded'"),
        ({"prompt": "What is it?", "figures": [b"\x89PNG\r\n"]}, "'figures'"),
        ({"prompt": "What is it?", "speech": {"array": [0.1], "sampling_rate": 16000}}, "'speech'"),
        ({"prompt": [{"role": "user", "content": [{"image": "a.png"}, {"text": "?"}]}]}, "'prompt'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]}, "'prompt'"),
    ],
)
def test_images_are_refused_by_the_name_of_their_column(columns: dict[str, Any], named: str):
    with pytest.raises(DataError, match=f"file, line 7.*{named}.*text only"):
        made(columns, "prompt")


def test_empty_image_columns_and_other_words_are_columns_like_others():
    columns = {"prompt": "1 + 1", "images": [], "video": None, "image": "none", "file": "a.png", "bytes": b"1"}
    assert made(columns, "prompt")[0].prompt == "1 + 1"
