from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from lachesis.common.errors import ConfigError, DataError
from lachesis.rollouts.datasets import Dataset, load_problems, rendering
from tests.tiny import BOS, BOS_ID, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Adds a begin token to plain text, as many models' tokenizers do."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def write(tmp_path):
    def write(*lines: Any) -> Path:
        path = tmp_path / "problems.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return write


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class TestGoodFiles:
    def test_prompts_come_in_file_order_with_all_columns(self, write, tokenizer):
        path = write({"prompt": "1+2=", "answer": "3"}, {"prompt": "4+5=", "answer": "9", "level": 2})
        first, second = load_problems(path, tokenizer=tokenizer)
        assert (first.id, second.id) == ("0", "1")
        assert (first.text, first.messages) == ("1+2=", None)
        assert first.columns == {"prompt": "1+2=", "answer": "3", "level": None}
        assert second.columns == {"prompt": "4+5=", "answer": "9", "level": 2}

    def test_plain_text_gets_the_tokenizers_special_tokens(self, write, tokenizer):
        (prompt,) = load_problems(write({"prompt": "1+2="}), tokenizer=tokenizer)
        assert prompt.token_ids == tuple(tokenizer("1+2=")["input_ids"])
        assert prompt.token_ids[0] == BOS_ID

    def test_conversations_go_through_the_template_and_get_no_further_special_tokens(self, write, tokenizer):
        path = write({"prompt": [{"role": "system", "content": "add"}, user("1+2")]})
        (prompt,) = load_problems(path, tokenizer=tokenizer, chat_template_kwargs={"mood": "calm"})
        assert prompt.text == "[system]add\n[user]1+2\n[assistant]calm"
        assert prompt.token_ids == tuple(tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
        assert prompt.token_ids[0] != BOS_ID
        assert prompt.messages == ({"role": "system", "content": "add"}, user("1+2"))

    def test_a_conversation_that_ends_with_the_assistant_is_continued(self, write, tokenizer):
        path = write({"prompt": [user("1+2"), {"role": "assistant", "content": "It is"}]})
        (prompt,) = load_problems(path, tokenizer=tokenizer)
        assert prompt.text == "[user]1+2\n[assistant]It is"

    def test_the_column_can_be_named_and_both_kinds_can_be_mixed(self, write, tokenizer):
        path = write({"q": "1+2="}, {"q": [user("1+2")]}, {"q": "3+4="})
        prompts = load_problems(Dataset(str(path), prompt_column="q"), tokenizer=tokenizer)
        assert [prompt.text for prompt in prompts] == ["1+2=", "[user]1+2\n[assistant]", "3+4="]
        assert [prompt.messages is None for prompt in prompts] == [True, False, True]

    def test_batches_of_the_tokenizer_do_not_show(self, write, tokenizer, monkeypatch):
        path = write(*({"prompt": "1" * n if n % 3 else [user("1" * n)]} for n in range(1, 12)))
        whole = load_problems(path, tokenizer=tokenizer)
        monkeypatch.setattr(rendering, "TOKENIZER_BATCH", 2)
        assert load_problems(path, tokenizer=tokenizer) == whole

    def test_blank_lines_byte_order_marks_and_windows_line_ends_do_no_harm(self, tmp_path, tokenizer):
        path = tmp_path / "windows.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\r\n\r\n{"prompt": "2"}\r\n  \r\n')
        assert [prompt.text for prompt in load_problems(path, tokenizer=tokenizer)] == ["1", "2"]


class TestBadFiles:
    def refuse(self, path: Path, tokenizer: Any, match: str, **options: Any) -> DataError:
        with pytest.raises(DataError, match=match) as caught:
            load_problems(path, tokenizer=tokenizer, **options)
        assert str(path) in caught.value.message
        assert caught.value.remedy
        return caught.value

    def test_missing_file(self, tmp_path, tokenizer):
        self.refuse(tmp_path / "nowhere.jsonl", tokenizer, "No such file")

    @pytest.mark.parametrize("lines", [[""], ["", "  ", ""]])
    def test_empty_file(self, write, tokenizer, lines):
        self.refuse(write(*lines), tokenizer, "is empty")

    @pytest.mark.parametrize(
        ("line", "what"),
        [
            ('{"prompt": "2"', "malformed JSON: Expecting ',' delimiter at column 15"),
            ("prompt: 2", "malformed JSON: Expecting value at column 1"),
            ('{"prompt": "2"},', "malformed JSON: Extra data at column 16"),
            ('["2"]', "a list, not an object"),
            ('"2"', "a string, not an object"),
            ("null", "null, not an object"),
            ("[" * 100_000, "cannot be read"),
        ],
    )
    def test_malformed_line(self, write, tokenizer, line, what):
        path = write({"prompt": "1"}, "", line)
        self.refuse(path, tokenizer, re.escape("line 3: ") + ".*" + re.escape(what))

    def test_text_that_is_not_utf8(self, tmp_path, tokenizer):
        path = tmp_path / "latin.jsonl"
        path.write_bytes(b'{"prompt": "1"}\n{"prompt": "\xe9"}')
        self.refuse(path, tokenizer, r"line 2: not UTF-8 text \(byte 13")

    def test_missing_prompt_column_names_the_columns_and_the_nearest(self, write, tokenizer):
        path = write({"promt": "1", "answer": "2"})
        error = self.refuse(path, tokenizer, "line 1: no prompt in column 'prompt'.*with values are: promt, answer")
        assert error.remedy == "set `data.prompt_column: promt`"

    @pytest.mark.parametrize(
        "columns",
        [
            {"question": "1 + 1?"},
            {"query": "1 + 1?", "answer": "#### 2"},
            {"Question": "1?"},
            {"text": "1?", "label": "1"},
        ],
    )
    def test_the_question_of_public_data_sets_is_named(self, write, tokenizer, columns: dict[str, str]):
        error = self.refuse(write(columns), tokenizer, "no prompt in column 'prompt'")
        assert error.remedy == f"set `data.prompt_column: {next(iter(columns))}`"

    def test_prompt_missing_in_one_line(self, write, tokenizer):
        path = write({"prompt": "1", "answer": "1"}, {"answer": "2"})
        self.refuse(path, tokenizer, "line 2: no prompt in column 'prompt'; the columns with values are: answer")

    @pytest.mark.parametrize(
        ("prompt", "what"),
        [
            (3, "is a number"),
            (True, "is true"),
            ({"role": "user", "content": "1"}, "is an object"),
            ("", "is empty"),
            (" \n", "is empty"),
            ([], "is empty"),
            (["1"], "message 1 of the prompt"),
            ([{"role": "user", "content": "1"}, {"content": "2"}], "message 2 of the prompt"),
            ([{"role": "user"}], "message 1 of the prompt"),
        ],
    )
    def test_prompt_of_the_wrong_kind(self, write, tokenizer, prompt, what):
        self.refuse(write({"prompt": "1"}, {"prompt": prompt}), tokenizer, f"line 2: .*{what}")

    def test_conversation_without_chat_template(self, write):
        error = self.refuse(write({"prompt": [user("1")]}), tiny_tokenizer(), "line 1: .*no chat template")
        assert "model.chat_template" in error.remedy

    def test_template_that_refuses_the_conversation(self, write):
        strict = tiny_tokenizer()
        strict.chat_template = "{{ raise_exception('roles must alternate') }}"
        self.refuse(write({"prompt": [user("1")]}), strict, "line 1: .*roles must alternate")

    def test_prompt_that_the_tokenizer_chokes_on_is_found_in_its_batch(self, write, tokenizer):
        path = write({"prompt": "1"}, {"prompt": "2"}, '{"prompt": "\\ud800"}', {"prompt": "4"})
        self.refuse(path, tokenizer, "line 3: the prompt cannot be tokenized")

    def test_prompt_without_tokens(self, write):
        class Nothing:
            chat_template = None

            def __call__(self, texts, **_):
                return {"input_ids": [[] if text == "2" else [5] for text in texts]}

        self.refuse(write({"prompt": "1"}, {"prompt": "2"}), Nothing(), "line 2: the tokenizer returns no tokens")

    def test_template_variables_that_would_change_what_is_asked(self, write, tokenizer):
        with pytest.raises(ConfigError, match="add_generation_prompt"):
            load_problems(
                write({"prompt": "1"}), tokenizer=tokenizer, chat_template_kwargs={"add_generation_prompt": 0}
            )


class TestLongPrompts:
    LINES = ({"prompt": "1"}, {"prompt": "12345"}, {"prompt": "123"}, {"prompt": "123456"})

    def test_error_names_line_tokens_and_limit(self, write, tokenizer):
        with pytest.raises(DataError, match="line 2: the prompt has 6 tokens, but only 5 are allowed") as caught:
            load_problems(write(*self.LINES), tokenizer=tokenizer, max_prompt_length=5)
        assert "2 of 4 prompts" in caught.value.message
        assert "data.max_prompt_length" in caught.value.remedy

    def test_drop_counts_and_keeps_the_ids(self, write, tokenizer, caplog):
        path = write(*self.LINES)
        prompts = load_problems(path, tokenizer=tokenizer, max_prompt_length=5, overlong="drop")
        assert [(prompt.id, prompt.text) for prompt in prompts] == [("0", "1"), ("2", "123")]
        assert "dropped 2 of 4 prompts" in caplog.text

    def test_nothing_remains(self, write, tokenizer):
        with pytest.raises(DataError, match="all 4 prompts have more than 1 tokens"):
            load_problems(write(*self.LINES), tokenizer=tokenizer, max_prompt_length=1, overlong="drop")

    def test_a_prompt_of_the_longest_length_is_allowed(self, write, tokenizer):
        path = write(*self.LINES)
        assert len(load_problems(path, tokenizer=tokenizer, max_prompt_length=7)) == 4
        assert len(load_problems(path, tokenizer=tokenizer)) == 4


class TestFormats:
    PAIR = {"instruction": "1+2", "response": "3"}  # noqa: RUF012

    def test_a_question_is_a_conversation_where_there_is_a_template(self, write, tokenizer):
        (prompt,) = load_problems(write(self.PAIR), tokenizer=tokenizer)
        assert prompt.text == "[user]1+2\n[assistant]"
        assert prompt.columns == self.PAIR | {"answer": "3"}

    def test_and_a_text_where_there_is_none(self, write):
        (prompt,) = load_problems(write(self.PAIR), tokenizer=tiny_tokenizer())
        assert (prompt.text, prompt.messages) == ("1+2", None)

    def test_a_template_may_come_with_the_variables(self, write):
        (prompt,) = load_problems(
            write(self.PAIR), tokenizer=tiny_tokenizer(), chat_template_kwargs={"chat_template": TEMPLATE}
        )
        assert prompt.text == "[user]1+2\n[assistant]"

    def test_follow_ups_are_problems_of_their_own(self, write, tokenizer):
        path = write(self.PAIR | {"follow_up": "twice?", "follow_up_response": "6"}, self.PAIR)
        first, second, third = load_problems(path, tokenizer=tokenizer)
        assert [first.id, second.id, third.id] == ["0", "0+1", "1"]
        assert second.text == "[user]1+2\n[assistant]3\n[user]twice?\n[assistant]"
        assert (second.columns["answer"], second.columns["response"]) == ("6", "6")
        assert (first.columns["answer"], third.columns["follow_up"]) == ("3", None)

    def test_a_system_prompt_goes_first_and_replaces_none(self, write, tokenizer):
        own = [{"role": "system", "content": "own"}, user("3")]
        path = write({"prompt": "1"}, {"prompt": [user("2")]}, {"prompt": own})
        prompts = load_problems(path, tokenizer=tokenizer, system_prompt="add")
        assert [prompt.text.partition("[user]")[0] for prompt in prompts] == ["[system]add\n"] * 2 + ["[system]own\n"]

    def test_what_is_no_prompt_stays_an_error_with_a_system_prompt(self, write, tokenizer):
        with pytest.raises(DataError, match="line 1: the prompt in column 'prompt' is empty"):
            load_problems(write({"prompt": " "}), tokenizer=tokenizer, system_prompt="add")


class TestSeveralDatasets:
    def test_they_follow_each_other_with_ids_of_their_own_and_all_columns(self, tmp_path, tokenizer):
        (tmp_path / "a.jsonl").write_text('{"prompt": "1", "x": 1}\n{"prompt": "2"}')
        (tmp_path / "b.csv").write_text("input,output\n3,4\n5,6\n")
        more = [Dataset(str(tmp_path / "b.csv")), Dataset(str(tmp_path / "a.jsonl"), split="train[1:]")]
        prompts = load_problems(tmp_path / "a.jsonl", tokenizer=tokenizer, more=more)
        assert [prompt.id for prompt in prompts] == ["0", "1", "2", "3", "4"]
        assert [prompt.columns["answer"] for prompt in prompts] == [None, None, "4", "6", None]
        assert {frozenset(prompt.columns) for prompt in prompts} == {
            frozenset({"prompt", "x", "input", "output", "answer"})
        }

    def test_ids_go_on_after_a_follow_up(self, tmp_path, tokenizer):
        row = {"input": "1", "output": "2", "follow_up": "3", "follow_up_response": "4"}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        path = tmp_path / "a.jsonl"
        prompts = load_problems(path, tokenizer=tokenizer, more=[Dataset(str(path))])
        assert [prompt.id for prompt in prompts] == ["0", "0+1", "1", "1+1"]

    def test_the_limit_is_checked_over_all_and_names_the_file(self, tmp_path, tokenizer):
        (tmp_path / "a.jsonl").write_text('{"prompt": "1"}')
        (tmp_path / "b.jsonl").write_text('{"prompt": "123456"}')
        with pytest.raises(DataError, match=r"b\.jsonl, line 1: the prompt has 7 tokens, but only 3 are allowed"):
            load_problems(
                tmp_path / "a.jsonl",
                tokenizer=tokenizer,
                more=[Dataset(str(tmp_path / "b.jsonl"))],
                max_prompt_length=3,
            )
