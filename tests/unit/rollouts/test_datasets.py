from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from lachesis.errors import CheckpointError, ConfigError, DataError
from lachesis.rollouts import datasets
from lachesis.rollouts.datasets import PromptStream, load_problems, split_eval
from lachesis.types import Prompt
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
        prompts = load_problems(path, tokenizer=tokenizer, prompt_column="q")
        assert [prompt.text for prompt in prompts] == ["1+2=", "[user]1+2\n[assistant]", "3+4="]
        assert [prompt.messages is None for prompt in prompts] == [True, False, True]

    def test_batches_of_the_tokenizer_do_not_show(self, write, tokenizer, monkeypatch):
        path = write(*({"prompt": "1" * n if n % 3 else [user("1" * n)]} for n in range(1, 12)))
        whole = load_problems(path, tokenizer=tokenizer)
        monkeypatch.setattr(datasets, "_TOKENIZER_BATCH", 2)
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

    def test_directory(self, tmp_path, tokenizer):
        self.refuse(tmp_path, tokenizer, "directory")

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
        error = self.refuse(path, tokenizer, "line 1: no prompt in column 'prompt'.*there are: promt, answer")
        assert error.remedy == "set data.prompt_column to 'promt'"

    def test_prompt_missing_in_one_line(self, write, tokenizer):
        path = write({"prompt": "1", "answer": "1"}, {"answer": "2"})
        self.refuse(path, tokenizer, "line 2: no prompt in column 'prompt'; the columns there are: answer")

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
        def nothing(texts, **_):
            return {"input_ids": [[] if text == "2" else [5] for text in texts]}

        self.refuse(write({"prompt": "1"}, {"prompt": "2"}), nothing, "line 2: the tokenizer makes no tokens")

    def test_template_variables_that_would_change_what_is_asked(self, write, tokenizer):
        with pytest.raises(ConfigError, match="add_generation_prompt"):
            load_problems(
                write({"prompt": "1"}), tokenizer=tokenizer, chat_template_kwargs={"add_generation_prompt": 0}
            )


class TestLongPrompts:
    LINES = ({"prompt": "1"}, {"prompt": "12345"}, {"prompt": "123"}, {"prompt": "123456"})

    def test_error_names_line_tokens_and_limit(self, write, tokenizer):
        with pytest.raises(DataError, match="line 2: the prompt has 6 tokens, 5 are allowed") as caught:
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


def numbered(count: int) -> list[Prompt]:
    return [Prompt(id=str(i), token_ids=(i,), text=f"{i}", columns={"answer": i}) for i in range(count)]


def ids(prompts: list[Prompt]) -> list[int]:
    return [int(prompt.id) for prompt in prompts]


class TestSplit:
    def test_the_parts_are_disjoint_complete_and_random(self):
        training, held_out = split_eval(numbered(100), 20, seed=1)
        assert len(held_out) == 20
        assert sorted(ids(training) + ids(held_out)) == list(range(100))
        assert ids(training) == sorted(ids(training))
        assert ids(held_out) not in (list(range(80, 100)), list(range(20)))

    def test_the_seed_decides(self):
        assert split_eval(numbered(50), 10, seed=1) == split_eval(numbered(50), 10, seed=1)
        assert split_eval(numbered(50), 10, seed=1) != split_eval(numbered(50), 10, seed=2)

    def test_nothing_held_out(self):
        assert split_eval(numbered(5), 0, seed=0) == (numbered(5), [])

    def test_nothing_left_to_train_on(self):
        with pytest.raises(DataError, match=r"data\.eval_size is 5, and there are only 5"):
            split_eval(numbered(5), 5, seed=0)


class TestStream:
    def test_every_epoch_has_every_prompt_in_an_order_of_its_own(self):
        stream = PromptStream(numbered(20), seed=3)
        first, second = ids(stream.take(20)), ids(stream.take(20))
        assert sorted(first) == sorted(second) == list(range(20))
        assert first != second
        assert first != list(range(20))
        assert stream.epoch == 1

    def test_the_seed_decides(self):
        def order(seed: int) -> list[int]:
            return ids(PromptStream(numbered(20), seed=seed).take(40))

        assert order(3) == order(3)
        assert order(3) != order(4)

    def test_the_size_of_the_bites_does_not_matter(self):
        whole = ids(PromptStream(numbered(7), seed=0).take(30))
        stream = PromptStream(numbered(7), seed=0)
        assert [n for size in (1, 9, 3, 17) for n in ids(stream.take(size))] == whole

    def test_without_shuffling_the_order_is_the_files(self):
        assert ids(PromptStream(numbered(3), seed=0, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]

    @pytest.mark.parametrize("taken", [0, 4, 7, 16])
    def test_resume_is_exact(self, taken):
        stream = PromptStream(numbered(7), seed=0)
        stream.put_back(stream.take(taken)[-2:])
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = PromptStream(numbered(7), seed=0)
        resumed.take(3)
        resumed.load_state_dict(state)
        assert ids(resumed.take(25)) == ids(stream.take(25))

    def test_what_is_put_back_comes_first_in_its_order(self):
        stream = PromptStream(numbered(5), seed=0, shuffle=False)
        taken = stream.take(3)
        stream.put_back(taken[1:])
        stream.put_back(taken[:1])
        assert ids(stream.take(1)) == [0]
        assert ids(stream.take(4)) == [1, 2, 3, 4]

    def test_a_strange_prompt_is_not_taken_back(self):
        stream = PromptStream(numbered(5), seed=0)
        with pytest.raises(DataError, match="'77'"):
            stream.put_back([*numbered(2), Prompt(id="77", token_ids=(1,), text="x")])
        assert stream.state_dict()["front"] == []

    def test_another_dataset_is_refused(self):
        state = PromptStream(numbered(5), seed=0).state_dict()
        for other in (numbered(6), numbered(5)[::-1], [*numbered(4), Prompt("4", (9,), "nine")]):
            with pytest.raises(CheckpointError, match="dataset"):
                PromptStream(other, seed=0).load_state_dict(state)

    def test_prompts_that_make_no_stream(self):
        with pytest.raises(DataError, match="no prompts"):
            PromptStream([], seed=0)
        with pytest.raises(DataError, match="one id"):
            PromptStream([*numbered(2), *numbered(1)], seed=0)

    def test_its_columns(self):
        assert PromptStream(numbered(2), seed=0).columns == {"answer"}
