from __future__ import annotations

import os
from pathlib import Path

import pytest

from lachesis.common.files import atomic_directory, clean_leftovers, restore_replaced, write_atomic


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_write_atomic_writes_text_and_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "new" / "a.json", "γ")
    write_atomic(tmp_path / "new" / "a.json", "δ")
    write_atomic(tmp_path / "new" / "b.bin", b"\x00\xff")
    assert (tmp_path / "new" / "a.json").read_text(encoding="utf-8") == "δ"
    assert (tmp_path / "new" / "b.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path / "new") == ["a.json", "b.bin"]


def test_write_atomic_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "a", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_new_files_get_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_atomic(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_need_not_last_is_not_forced_to_disk_and_what_is_private_is_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("forced to disk"))
    write_atomic(tmp_path / "private", "x", durable=False, mode=0o600)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    with atomic_directory(tmp_path / "v1", durable=False) as temporary:
        (temporary / "file").write_text("x")
    assert names(tmp_path) == ["private", "v1"]


def test_directory_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("1")
        assert not target.exists()
    assert (target / "inner" / "file").read_text() == "1"
    assert names(tmp_path) == ["model"]


def test_everything_is_on_disk_before_the_rename_and_the_rename_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int | str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source: Path, destination: Path) -> None:
        calls.append("rename")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    with atomic_directory(tmp_path / "model") as temporary:
        (temporary / "inner").mkdir()
        for name in ("a", "inner/b"):
            (temporary / name).write_text(name)
    inside = [tmp_path / "model" / name for name in ("", "a", "inner", "inner/b")]
    at = calls.index("rename")
    assert {path.stat().st_ino for path in inside} <= set(calls[:at])
    assert tmp_path.stat().st_ino in calls[at:]


def test_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for name in ("first", "second"):
        with atomic_directory(target) as temporary:
            (temporary / name).write_text(name)
    assert names(target) == ["second"]
    assert names(tmp_path) == ["model"]


def test_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as temporary:
        (temporary / "old").write_text("")
    with pytest.raises(KeyboardInterrupt), atomic_directory(target) as temporary:
        (temporary / "new").write_text("")
        raise KeyboardInterrupt
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]


def test_failed_rename_puts_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as temporary:
        (temporary / "old").write_text("")
    rename = os.rename

    def refuse_the_new_one(source: Path, destination: Path) -> None:
        if Path(source).name.startswith(".tmp-"):
            raise OSError("refused")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse_the_new_one)
    with pytest.raises(OSError, match="refused"), atomic_directory(target):
        pass
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]


def test_a_replaced_directory_without_successor_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".old-model").mkdir()
    restore_replaced(tmp_path)
    assert names(tmp_path) == ["model"]


def test_leftovers_are_removed_but_nothing_else(tmp_path: Path) -> None:
    for name in (".tmp-a", ".old-b", "b", ".git", "step_000001"):
        (tmp_path / name).mkdir()
    removed = clean_leftovers(tmp_path)
    assert sorted(path.name for path in removed) == [".old-b", ".tmp-a"]
    assert names(tmp_path) == [".git", "b", "step_000001"]
