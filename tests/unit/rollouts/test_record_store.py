"""Records that outlive a kill: what was written comes back, what is damaged or dropped does not."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lachesis.common.json_values import json_bytes
from lachesis.rollouts.record_store import Entry, RecordStore


def written(path: Path, *records: tuple[int, dict], dropped: tuple[int, ...] = ()) -> None:
    store = RecordStore(path)
    for key, record in records:
        store.append(key, lambda record=record: record)
    store.drop(dropped)
    store.close()
    store.close()


def read(path: Path) -> tuple[list[Entry], int]:
    store = RecordStore(path)
    try:
        return store.read()
    finally:
        store.close()


def test_numbers_come_back_exactly_and_what_was_dropped_does_not(tmp_path: Path):
    path = tmp_path / "kept.sqlite"
    assert read(path) == ([], 0) and not path.exists()
    exact = {"logprobs": [-1 / 3, -1e-17, None], "text": "\ud800 and \n"}
    written(path, (1, exact), (2, {"n": 2}), (1, {"n": 1}), dropped=(2, 7))
    assert read(path) == ([Entry(1, exact), Entry(1, {"n": 1})], 0)
    assert read(path) == ([Entry(1, exact), Entry(1, {"n": 1})], 0), "reading changes nothing"


def test_what_is_dropped_and_comes_again_is_there(tmp_path: Path):
    path = tmp_path / "kept.sqlite"
    written(path, (3, {"n": 1}), dropped=(3,))
    written(path, (3, {"n": 2}))
    assert read(path)[0] == [Entry(3, {"n": 2})]


def test_a_record_that_is_damaged_is_passed_over(tmp_path: Path):
    path = tmp_path / "kept.sqlite"
    written(path, (1, {"n": 1}), (2, {"n": 2}))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE records SET record = substr(record, 2) WHERE key = 2")
    assert read(path) == ([Entry(1, {"n": 1})], 1)


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_what_is_no_file_of_records_is_put_aside(tmp_path: Path, keep: int):
    """Cut off in its first page or in a later one, or another file altogether."""
    path = tmp_path / "kept.sqlite"
    written(path, *((key, {"tokens": list(range(300))}) for key in range(20)))
    damaged = path.read_bytes()[:keep] if keep else b"no database, but long enough to be taken for one" * 20
    path.write_bytes(damaged)
    with pytest.raises(OSError, match=r"is damaged \(.+\), and is kept.sqlite.damaged now"):
        read(path)
    assert path.with_name("kept.sqlite.damaged").read_bytes() == damaged
    written(path, (1, {"n": 1}))
    assert read(path) == ([Entry(1, {"n": 1})], 0)


def test_half_a_write_is_taken_back(tmp_path: Path):
    """As after kill -9: the file as it is in the middle of a change, with the log of what stood there before."""
    path, cut = tmp_path / "kept.sqlite", tmp_path / "cut" / "kept.sqlite"
    written(path, (1, {"n": 1}))
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA cache_size = 1")
        database.executemany("INSERT INTO records (key, record) VALUES (2, ?)", [(b"9" * 4000,)] * 50)
        cut.parent.mkdir()
        for file in tmp_path.glob("kept.sqlite*"):
            shutil.copy(file, cut.parent)
    assert len(list(cut.parent.iterdir())) == 2 and cut.stat().st_size > path.stat().st_size
    assert read(cut) == ([Entry(1, {"n": 1})], 0)


def test_the_file_shrinks_with_what_is_not_needed(tmp_path: Path):
    path = tmp_path / "kept.sqlite"
    store = RecordStore(path)
    sizes = []
    for key in range(60):
        store.append(key, lambda: {"tokens": list(range(2000))})
        if key >= 4:
            store.drop([key - 4])
        store.flush()
        sizes.append(path.stat().st_size)
    store.close()
    record = len(json_bytes({"tokens": list(range(2000))}))
    assert max(sizes) < 8 * record and [entry.key for entry in read(path)[0]] == [56, 57, 58, 59]
    written(path, dropped=(56, 57, 58, 59))
    assert path.stat().st_size < 3 * record


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "lachesis"):
        written(tmp_path / "gone" / "kept.sqlite", (1, {}), (2, {}))
    assert [record.message.partition(" cannot")[2][:16] for record in caplog.records] == [" be written, so "]
