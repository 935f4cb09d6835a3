from __future__ import annotations

import errno
import gzip
import json
import os
import random
from pathlib import Path

import pytest

from lachesis.api.journal import Journal, StoreFailed, sync_and_close
from lachesis.api.records import Change, HeldGroup, Snapshot, StoredGroup
from lachesis.common.errors import ConfigError
from tests.unit.api.processes import scored


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


def reopened(directory: Path, journal: Journal, **options) -> Snapshot:
    journal.close()
    again = Journal(directory, **options)
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


def test_death_at_any_byte_leaves_whole_changes(tmp_path):
    journal = Journal(tmp_path / "whole")
    states = [contents(journal)]
    ends = [os.path.getsize(tmp_path / "whole" / "00000001.journal")]
    for change in history():
        journal.commit(change)
        states.append(contents(journal))
        ends.append(os.path.getsize(tmp_path / "whole" / "00000001.journal"))
    journal.close()
    data = (tmp_path / "whole" / "00000001.journal").read_bytes()
    for cut in [*range(0, len(data), 7), len(data)]:
        place = tmp_path / f"cut{cut}"
        place.mkdir()
        (place / "00000001.journal").write_bytes(data[:cut])
        again = Journal(place)
        survived = max((index for index, end in enumerate(ends) if end <= cut), default=0)
        assert contents(again) == states[survived]
        # And it goes on from there.
        again.commit(Change(added=(held(90),)))
        assert any(entry.number == 90 for entry in reopened(place, again).held)


def test_damage_ends_a_segment(tmp_path, caplog):
    journal = Journal(tmp_path)
    journal.commit(Change(added=(held(0),)))
    journal.commit(Change(added=(held(1),)))
    journal.close()
    path = tmp_path / "00000001.journal"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    journal = Journal(tmp_path)
    assert [entry.number for entry in contents(journal).held] == [0]
    assert "ignored" in caplog.text
    journal.close()


def test_gzipped_posts_are_kept_as_they_came(tmp_path):
    text = json.dumps(scored(2, mark=4, length=300)).encode()
    packed = gzip.compress(text)
    journal = Journal(tmp_path)
    journal.commit(Change(added=(held(0, length=9000),), packed=packed))
    assert os.path.getsize(tmp_path / "00000001.journal") < 1000
    (again,) = reopened(tmp_path, journal).held
    assert json.loads(again.group.json)["tokens"] == [[4] * 300] * 2
    assert again.group.sequences == 4


def test_old_segments_go_and_what_is_needed_moves(tmp_path):
    chance = random.Random(2)
    journal = Journal(tmp_path, segment_bytes=4000)
    journal.commit(Change(summary={"step": 3}, receipts=(("k", b"{}"),)))
    journal.commit(Change(added=(held(0), held(1)), batched=((1, 8),)))
    alive = {0, 1}
    for number in range(2, 400):
        journal.commit(Change(added=(held(number, length=chance.randrange(10, 400)),)))
        alive.add(number)
        if len(alive) > 12:
            gone = chance.choice(sorted(alive - {0, 1}))
            alive.remove(gone)
            journal.commit(Change(removed=(gone,)))
    files = list(tmp_path.glob("*.journal"))
    assert sum(path.stat().st_size for path in files) < 6 * 4000 and len(files) < 9
    before = contents(journal)
    assert {entry.number for entry in before.held} == alive and before.batch_of == {1: 8}
    assert reopened(tmp_path, journal, segment_bytes=4000) == before
    assert before.summary == {"step": 3} and before.receipts == {"k": b"{}"}


def test_wipe(tmp_path):
    journal = Journal(tmp_path, segment_bytes=500)
    for change in history():
        journal.commit(change)
    journal.commit(Change(wipe=True, summary={"step": 0}))
    journal.commit(Change(added=(held(0),)))
    snapshot = reopened(tmp_path, journal)
    assert [entry.number for entry in snapshot.held] == [0] and snapshot.receipts == {}


def test_full_disk_changes_nothing(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.commit(Change(added=(held(0),)))
    before = contents(journal)
    real = os.writev

    def half(file: int, parts: list[bytes]) -> int:
        os.write(file, b"".join(parts)[:30])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(StoreFailed, match="No space left"):
        journal.commit(Change(added=(held(1),)))
    assert contents(journal) == before
    monkeypatch.setattr(os, "writev", real)
    journal.commit(Change(added=(held(2),)))
    assert [entry.number for entry in reopened(tmp_path, journal).held] == [0, 2]


def test_full_disk_at_a_new_segment(tmp_path, monkeypatch):
    journal = Journal(tmp_path, segment_bytes=200)
    journal.commit(Change(added=(held(0, length=300),), summary={"step": 1}))
    monkeypatch.setattr(os, "writev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    for _ in range(2):
        with pytest.raises(StoreFailed):
            journal.commit(Change(added=(held(1),)))
    monkeypatch.undo()
    journal.commit(Change(added=(held(2),)))
    snapshot = reopened(tmp_path, journal)
    assert [entry.number for entry in snapshot.held] == [0, 2] and snapshot.summary == {"step": 1}


def test_short_writes_are_finished(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, b"".join(parts)[:11]))
    journal.commit(Change(added=(held(0),)))
    monkeypatch.undo()
    assert len(reopened(tmp_path, journal).held) == 1


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


def test_sync_hands_out_files_once(tmp_path):
    journal = Journal(tmp_path)
    journal.commit(Change(added=(held(0),)))
    files = journal.unsynced()
    assert len(files) == 1 and journal.unsynced() == []
    sync_and_close(files)
    journal.commit(Change(added=(held(1),)))
    journal.close()
