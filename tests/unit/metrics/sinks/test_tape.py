from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import DataError
from lachesis.common.types import Group, StepRecord
from lachesis.metrics.sinks.tape import TapeSink, read_groups, read_lines, tape_files, token_texts

MakeGroup = Callable[..., Group]


def write(directory: Path, groups: Sequence[Group], *, step: int = 1, **options: Any) -> Path:
    TapeSink(directory, **options).write(StepRecord(step=step, values={}, groups=groups))
    return directory / f"step_{step:06d}.jsonl"


def test_groups_come_back_equal(tmp_path: Path, make_group: MakeGroup) -> None:
    plain = make_group((0.0, 1.0, None), answer="82", level=3, tags=["a", {"b": None}])
    first, *rest = plain.samples
    odd = replace(
        first,
        prompt_ids=(9, 9),
        completion_ids=(1, 2),
        logprobs=(-0.1 / 3, -1e-7),
        mask=(1, 0),
        text='"</script>\u2028\ud800\n日本',
        finish_reason="length",
        temperature=0.7,
        rewards=(0.5, None),
        advantage=None,
    )
    messages = ({"role": "user", "content": "37+45="},)
    chat = Group(prompt=replace(plain.prompt, messages=messages), samples=(odd, *rest))
    replayed = replace(plain, replaces=chat)
    assert read_groups(write(tmp_path, [plain, chat, replayed])) == [plain, chat, replayed]


def test_unknown_logprobs_are_null_on_disk_and_nan_in_memory(tmp_path: Path, make_group: MakeGroup) -> None:
    group = make_group()
    sample = replace(group.samples[0], logprobs=(-0.5, math.nan, -math.inf))
    path = write(tmp_path, [replace(group, samples=(sample,))])
    assert json.loads(path.read_text())["samples"][0]["logprobs"] == [-0.5, None, None]
    logprobs = read_groups(path)[0].samples[0].logprobs
    assert logprobs[0] == -0.5 and math.isnan(logprobs[1]) and math.isnan(logprobs[2])


def test_prompt_ids_are_written_only_where_they_differ(tmp_path: Path, make_group: MakeGroup) -> None:
    group = make_group()
    other = replace(group.samples[0], prompt_ids=(7,))
    line = next(read_lines(write(tmp_path, [replace(group, samples=(group.samples[0], other))])))
    assert ["prompt_ids" in sample for sample in line["samples"]] == [False, True]


def test_texts_of_tokens_only_for_the_first_groups(tmp_path: Path, make_group: MakeGroup) -> None:
    path = write(tmp_path, [make_group()] * 3, report_groups=2, texts=lambda ids: [f"<{i}>" for i in ids])
    lines = list(read_lines(path))
    assert lines[0]["samples"][1]["pieces"] == ["<2>", "<8>", "<1>"]
    assert ["pieces" in line["samples"][0] for line in lines] == [True, True, False]
    assert len(list(read_lines(path, limit=2))) == 2
    assert "pieces" not in next(read_lines(write(tmp_path, [make_group()], step=2, report_groups=2)))["samples"][0]


def test_resume_deletes_later_steps_and_a_new_run_all(tmp_path: Path, make_group: MakeGroup) -> None:
    for step in (1, 2, 3):
        write(tmp_path, [make_group()], step=step, resume_step=step)
    (tmp_path / "step_notes.jsonl").write_text("mine\n")
    TapeSink(tmp_path, resume_step=2)
    assert list(tape_files(tmp_path)) == [1, 2]
    TapeSink(tmp_path)
    assert tape_files(tmp_path) == {} and (tmp_path / "step_notes.jsonl").exists()


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    left, other = tmp_path / ".step_000003.jsonl.17-1234.tmp", tmp_path / "notes.tmp"
    for path in (left, other):
        path.write_text("{")
    TapeSink(tmp_path, resume_step=2)
    assert not left.exists() and other.exists()


def test_a_failed_write_leaves_nothing_half_done(
    tmp_path: Path, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, [make_group()])
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    sink = TapeSink(tmp_path, resume_step=1)
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        sink.write(StepRecord(step=1, values={}, groups=[make_group((1.0,))]))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == before


def test_a_step_without_groups_writes_no_file(tmp_path: Path) -> None:
    assert not write(tmp_path, []).exists()


def test_malformed_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    with pytest.raises(DataError, match="does not exist"):
        read_groups(path)
    for text in ("{", "[]", '{"prompt": {}}', '{"prompt": {}, "samples": []}'):
        path.write_text(text + "\n")
        with pytest.raises(DataError, match=r"step_000001\.jsonl, line 1: not a group"):
            read_groups(path)


class Pieces:
    """A SentencePiece-like tokenizer: the leading space of a text is lost when it is decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def convert_ids_to_tokens(self, ids: int) -> str:
        return ["\u2581the", "n", "<eos>"][ids]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        self.decoded += 1
        return ["the", "n", "<eos>"][token_ids[0]]


def test_texts_keep_leading_spaces_and_are_remembered() -> None:
    tokenizer = Pieces()
    texts = token_texts(tokenizer)
    assert texts((0, 1, 0, 2)) == [" the", "n", " the", "<eos>"]
    assert tokenizer.decoded == 3
