from __future__ import annotations

import gzip
import json
import random
import shutil
import threading
from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.atropos.api.entries import Change, HeldGroup, Snapshot, StoredGroup
from lachesis.plugins.atropos.api.journal import Journal, StoreFailed
from tests.unit.plugins.atropos.api.processes import full_disk, scored


def held(number: int, *, position: int | None = None, length: int = 50) -> HeldGroup:
    text = json.dumps({"number": number, "text": "x" * length}).encode()
    group = StoredGroup(json=text, sequences=4, tokens=9, env_id=None, score=0.25)
    return HeldGroup(number=number, group=group, position=number if position is None else position)


def contents(journal: Journal) -> Snapshot:
    snapshot = journal.snapshot()
    return Snapshot(
        held=tuple(sorted(snapshot.held, key=lambda entry: entry.number)),
        batch_of=dict(snapshot.batch_of), receipts=dict(snapshot.receipts), summary=dict(snapshot.summary),
    )  # fmt: skip


def reopened(directory: Path, journal: Journal) -> Snapshot:
    journal.close()
    again = Journal(directory)
    try:
        return contents(again)
    finally:
        again.close()


def history() -> list[Change]:
    return [
        Change(summary={"step": 0}),
        Change(added=(held(0), held(1), held(2, position=-1))),
        Change(added=(held(3),), receipts=(("key", b'{"status":"received"}'),)),
        Change(placed=((2, 7),), added=(held(4),)),
        Change(batched=((0, 5), (1, 5)), summary={"step": 1}),
        Change(removed=(3,)),
        Change(batched=((0, None),)),
        Change(removed=(1,), summary={"step": 2}),
    ]


def test_what_was_committed_is_there_again(tmp_path):
    journal = Journal(tmp_path)
    for change in history():
        journal.commit(change)
    before = contents(journal)
    assert [(entry.number, entry.position) for entry in before.held] == [(0, 0), (2, 7), (4, 4)]
    assert before.summary == {"step": 2} and before.receipts == {"key": b'{"status":"received"}'}
    assert before.batch_of == {}
    assert reopened(tmp_path, journal) == before


def log_of(directory: Path) -> Path:
    """What was committed since the disk was last told to keep it."""
    return directory / "state.sqlite-wal"


def test_death_at_any_byte_leaves_whole_changes(tmp_path):
    journal = Journal(tmp_path / "whole")
    states, ends = [], []
    for change in [Change(), *history()]:
        journal.commit(change)
        states.append(contents(journal))
        ends.append(log_of(tmp_path / "whole").stat().st_size)
    data = log_of(tmp_path / "whole").read_bytes()
    for cut in [*range(ends[0], len(data), 997), len(data)]:
        place = shutil.copytree(tmp_path / "whole", tmp_path / f"cut{cut}")
        log_of(place).write_bytes(data[:cut])
        again = Journal(place)
        survived = max(index for index, end in enumerate(ends) if end <= cut)
        assert contents(again) == states[survived]
        # And it goes on from there.
        again.commit(Change(added=(held(90),)))
        assert any(entry.number == 90 for entry in reopened(place, again).held)
    journal.close()


def test_damage_undoes_what_came_after_it(tmp_path):
    journal = Journal(tmp_path / "whole")
    journal.commit(Change(added=(held(0),)))
    journal.commit(Change(added=(held(1),)))
    place = shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    journal.close()
    data = bytearray(log_of(place).read_bytes())
    data[-10] ^= 1
    log_of(place).write_bytes(data)
    assert [entry.number for entry in contents(Journal(place)).held] == [0]


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "state.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="cannot be used: file is not a database"):
        Journal(tmp_path)


def test_gzipped_posts_are_kept_as_they_came(tmp_path):
    text = json.dumps(scored(2, mark=4, length=300)).encode()
    packed = gzip.compress(text)
    journal = Journal(tmp_path)
    journal.commit(Change(added=(held(0, length=9000),), packed=packed))
    assert packed in log_of(tmp_path).read_bytes() and b"x" * 100 not in log_of(tmp_path).read_bytes()
    (again,) = reopened(tmp_path, journal).held
    assert json.loads(again.group.json)["tokens"] == [[4] * 300] * 2
    assert again.group.sequences == 4


def test_room_of_what_is_gone_is_used_again(tmp_path):
    chance = random.Random(2)
    journal = Journal(tmp_path)
    journal.commit(Change(summary={"step": 3}, receipts=(("k", b"{}"),)))
    journal.commit(Change(added=(held(0), held(1)), batched=((1, 8),)))
    alive = {0, 1}
    for number in range(2, 400):
        journal.commit(Change(added=(held(number, length=chance.randrange(5000, 20_000)),)))
        alive.add(number)
        if len(alive) > 12:
            gone = chance.choice(sorted(alive - {0, 1}))
            alive.remove(gone)
            journal.commit(Change(removed=(gone,)))
        if number % 20 == 0:
            journal.sync()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 << 20
    before = contents(journal)
    assert {entry.number for entry in before.held} == alive and before.batch_of == {1: 8}
    assert reopened(tmp_path, journal) == before
    assert before.summary == {"step": 3} and before.receipts == {"k": b"{}"}


def test_the_last_receipts_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("lachesis.plugins.atropos.api.journal.RECEIPTS", 3)
    journal = Journal(tmp_path)
    for number in range(5):
        journal.commit(Change(receipts=((f"key{number}", b"{}"),)))
    assert list(reopened(tmp_path, journal).receipts) == ["key2", "key3", "key4"]


def test_wipe(tmp_path):
    journal = Journal(tmp_path)
    for change in history():
        journal.commit(change)
    journal.commit(Change(wipe=True, summary={"step": 0}))
    journal.commit(Change(added=(held(0),)))
    snapshot = reopened(tmp_path, journal)
    assert [entry.number for entry in snapshot.held] == [0] and snapshot.receipts == {}


def test_full_disk_changes_nothing(tmp_path):
    journal = Journal(tmp_path)
    journal.commit(Change(added=(held(0),), summary={"step": 1}))
    before = contents(journal)
    for _ in range(2):
        with full_disk(largest=log_of(tmp_path).stat().st_size + 3000), pytest.raises(StoreFailed, match="disk"):
            journal.commit(Change(added=(held(1, length=200_000),)))
        assert contents(journal) == before
    journal.commit(Change(added=(held(2),)))
    snapshot = reopened(tmp_path, journal)
    assert [entry.number for entry in snapshot.held] == [0, 2] and snapshot.summary == {"step": 1}


def test_many_groups_at_once(tmp_path):
    journal = Journal(tmp_path)
    journal.commit(Change(added=tuple(held(number) for number in range(1500))))
    assert len(reopened(tmp_path, journal).held) == 1500


def test_one_server_a_directory(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="another server uses"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal(tmp_path / "file")


def test_what_is_synced_needs_no_log(tmp_path):
    journal = Journal(tmp_path / "whole")
    journal.commit(Change(added=(held(0),)))
    thread = threading.Thread(target=journal.sync)
    thread.start()
    thread.join()
    journal.commit(Change(added=(held(1),)))
    place = tmp_path / "without"
    place.mkdir()
    shutil.copy(tmp_path / "whole" / "state.sqlite", place)
    journal.close()
    assert [entry.number for entry in contents(Journal(place)).held] == [0]
