from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lachesis.common.errors import DataError
from lachesis.common.types import Prompt
from lachesis.rollouts.datasets import Dataset, load_problems, problems
from lachesis.rollouts.datasets.problem_cache import tokenizer_digest
from tests.tiny import tiny_tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{{ mood }}"


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def load(tmp_path, tokenizer, monkeypatch):
    """Loads the file of the test, and counts how often that was prepared anew."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"instruction": "1", "response": "2"}) + "\n" + json.dumps({"instruction": "3"}))
    made = []
    original = problems._make

    def spy(*args, **kwargs):
        made.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(problems, "_make", spy)

    def load(**options: Any) -> tuple[list[Prompt], int]:
        options = {"tokenizer": tokenizer, "prepared_path": tmp_path / "prepared", "base_dir": tmp_path} | options
        read = {name: options.pop(name) for name in Dataset.__slots__ if name in options}
        before = len(made)
        return load_problems(Dataset(str(path), **read), **options), len(made) - before

    load.path = path  # type: ignore[attr-defined]
    return load


def kept(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "prepared").iterdir()
    return file


def test_what_was_prepared_is_used_again_and_equal(load):
    first, made = load()
    assert made == 1
    again, made = load()
    assert made == 0
    assert again == first


def test_limits_are_not_part_of_what_is_kept(load):
    load()
    with pytest.raises(DataError, match="line 1: the prompt has 7 tokens"):
        load(max_prompt_length=3)


@pytest.mark.parametrize(
    "change",
    [
        {"system_prompt": "s"},
        {"conversations": True},
        {"chat_template_kwargs": {"mood": "x"}},
        {"split": "train[:1]"},
        {"format": "instruction_response"},
        {"transform": "mine.py:f"},
        {"transform": "mine.py:g"},
    ],
)
def test_every_setting_that_matters_makes_a_new_one(load, tmp_path, change):
    (tmp_path / "mine.py").write_text("def f(row): return {'answer': 1}\ndef g(row): return {'answer': 2}")
    load()
    assert load(**change)[1] == 1
    assert load(**change)[1] == 0
    assert load()[1] == 0


def test_the_content_the_tokenizer_and_the_code_matter_too(load, tmp_path):
    (tmp_path / "mine.py").write_text("def f(row): return {'answer': 1}")
    load(transform="mine.py:f")
    (tmp_path / "mine.py").write_text("def f(row): return {'answer': 2}")
    prompts, made = load(transform="mine.py:f")
    assert (made, prompts[0].columns["answer"]) == (1, 2)
    other = tiny_tokenizer()
    other.chat_template = TEMPLATE + "!"
    assert load(tokenizer=other, transform="mine.py:f")[1] == 1
    load.path.write_text(json.dumps({"instruction": "9", "response": "8"}))
    prompts, made = load(transform="mine.py:f")
    assert (made, len(prompts)) == (1, 1)


def test_tokenizers_are_told_apart(tokenizer):
    other = tiny_tokenizer()
    digests = {tokenizer_digest(tokenizer), tokenizer_digest(other)}
    other.add_tokens(["<new>"])
    assert len(digests | {tokenizer_digest(other)}) == 3
    assert tokenizer_digest(tiny_tokenizer()) in digests


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-5], lambda b: b.replace(b'"1"', b'"7"'), lambda b: b"", lambda b: b"{}"]
)
def test_what_is_damaged_is_made_anew_with_a_note(load, tmp_path, damage, caplog):
    first, _ = load()
    file = kept(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    again, made = load()
    assert (again, made) == (first, 1)
    assert "is damaged; preparing the data again" in caplog.text
    assert load()[1] == 0


def test_columns_that_json_cannot_hold_are_not_kept(tmp_path, tokenizer, caplog):
    table = pa.Table.from_pylist([{"prompt": "1", "raw": b"\x00"}])
    parquet.write_table(table, tmp_path / "a.parquet")
    options: dict[str, Any] = {"tokenizer": tokenizer, "prepared_path": tmp_path / "prepared"}
    (prompt,) = load_problems(tmp_path / "a.parquet", **options)
    assert prompt.columns["raw"] == b"\x00"
    assert "is not stored" in caplog.text
    assert not (tmp_path / "prepared").exists()


def test_a_place_that_cannot_be_written(load, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"check data\.prepared_path"):
        load(prepared_path=tmp_path / "file" / "below")


def test_use_is_logged(load, caplog):
    load()
    caplog.set_level(logging.INFO)
    load()
    assert "using prepared data from " in caplog.text
