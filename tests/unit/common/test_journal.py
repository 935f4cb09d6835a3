"""Records that outlive a kill: what was written comes back, what is torn or dropped does not; the file stays small."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lachesis.common.journal import Entry, Journal


def written(path: Path, *records: tuple[int, dict], dropped: tuple[int, ...] = (), slack_bytes: int = 1 << 20) -> None:
    journal = Journal(path, slack_bytes=slack_bytes)
    for key, record in records:
        journal.append(key, lambda record=record: record)
    journal.drop(dropped)
    journal.close()
    journal.close()


def read(path: Path) -> tuple[list[Entry], int]:
    journal = Journal(path)
    try:
        return journal.read()
    finally:
        journal.close()


def test_numbers_come_back_exactly_and_what_was_dropped_does_not(tmp_path: Path):
    path = tmp_path / "kept.jsonl"
    assert read(path) == ([], 0) and not path.exists()
    exact = {"logprobs": [-1 / 3, -1e-17, None], "text": "\ud800 and \n"}
    written(path, (1, exact), (2, {"n": 2}), (1, {"n": 1}), dropped=(2, 7))
    assert read(path) == ([Entry(1, exact), Entry(1, {"n": 1})], 0)
    assert read(path) == ([Entry(1, exact), Entry(1, {"n": 1})], 0), "reading changes nothing"


def test_what_is_dropped_and_comes_again_is_there(tmp_path: Path):
    path = tmp_path / "kept.jsonl"
    written(path, (3, {"n": 1}), dropped=(3,))
    written(path, (3, {"n": 2}))
    assert read(path)[0] == [Entry(3, {"n": 2})]


@pytest.mark.parametrize("tail", [b"0123", b'deadbeef {"key": 5, "record": {}}\n', b"\n", b"\xff\xfe\n"])
def test_a_torn_or_changed_line_is_passed_over_and_goes(tmp_path: Path, tail: bytes):
    path = tmp_path / "kept.jsonl"
    written(path, (1, {"n": 1}))
    whole = path.read_bytes()
    path.write_bytes(tail + b"\n" + whole + tail)
    entries, damaged = read(path)
    assert entries == [Entry(1, {"n": 1})] and damaged >= 2 - tail.count(b"\n")
    assert path.read_bytes() == whole


def test_the_file_is_written_anew_once_most_of_it_is_not_needed(tmp_path: Path):
    path = tmp_path / "kept.jsonl"
    journal = Journal(path, slack_bytes=2_000)
    sizes = []
    for key in range(60):
        journal.append(key, lambda: {"tokens": list(range(50))})
        if key >= 4:
            journal.drop([key - 4])
        journal.flush()
        sizes.append(path.stat().st_size)
    journal.close()
    assert max(sizes) < 2_000 + 2 * 5 * 300 and [entry.key for entry in read(path)[0]] == [56, 57, 58, 59]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "lachesis"):
        written(tmp_path / "gone" / "kept.jsonl", (1, {}), (2, {}))
    assert [record.message.partition(" cannot")[2][:16] for record in caplog.records] == [" be written, so "]
