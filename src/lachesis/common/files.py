"""Files and directories that are written completely or not at all."""

from __future__ import annotations

import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = ".tmp-"
_REPLACED = ".old-"
_UNFINISHED = re.compile(r"\..+\.\d+-\d+\.tmp")


def write_atomic(path: Path, data: str | bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace the file ``path`` with ``data`` (text as UTF-8): readers see the old content or the new one.

    The data is written next to the target before the rename, so a kill leaves the old file and a partial one, which
    :func:`clean_files` removes. Missing parent directories are created.

    Args:
        durable: force the data to disk too, so that the same holds for a power cut.
        mode: permissions of the file from the start, minus the process's umask.

    Raises:
        OSError: the disk is full or the directory is not writable; the old file is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    # A leftover of a killed process with the same pid might be another user's, or a link to a foreign file.
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(payload)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_path(path.parent)


def clean_files(parent: Path) -> None:
    """Remove files that killed :func:`write_atomic` calls left in a directory that has no other writer now."""
    for path in parent.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            path.unlink()


@contextmanager
def atomic_directory(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty directory next to ``target`` that becomes ``target`` when the block ends without error.

    If ``durable``, all its files are forced to disk before the rename. On an error it is removed and an existing
    ``target`` stays as it was. A process killed inside the block leaves a hidden directory, which
    :func:`clean_leftovers` removes. One writer at a time.

    Raises:
        OSError: the disk is full or the parent is not writable.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{_TEMPORARY}{target.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
        if durable:
            _fsync_tree(temporary)
        aside = _swap(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if durable:
        fsync_path(target.parent)
    if aside is not None:
        shutil.rmtree(aside)


def clean_leftovers(parent: Path) -> list[Path]:
    """Remove and return the directories that killed :func:`atomic_directory` blocks left in ``parent``.

    A directory that was moved aside to make room, and whose successor never arrived, is put back first.
    """
    restore_replaced(parent)
    leftovers = [path for prefix in (_TEMPORARY, _REPLACED) for path in parent.glob(f"{prefix}*")]
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def restore_replaced(parent: Path) -> None:
    """Put back directories that a killed process had moved aside without finishing their replacement."""
    for aside in parent.glob(f"{_REPLACED}*"):
        target = aside.with_name(aside.name.removeprefix(_REPLACED))
        if not target.exists():
            os.rename(aside, target)


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a file's content, read block by block."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def fsync_path(path: Path) -> None:
    """Force a file's content, or a directory's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(directory: Path) -> None:
    for root, _, names in os.walk(directory, topdown=False):
        for name in names:
            fsync_path(Path(root, name))
        fsync_path(Path(root))


def _swap(temporary: Path, target: Path) -> Path | None:
    """Rename ``temporary`` to ``target``; return the path that the old ``target`` was moved to, if there was one."""
    aside = target.with_name(f"{_REPLACED}{target.name}")
    replacing = target.exists()
    if replacing:
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        if replacing:
            os.rename(aside, target)
        raise
    return aside if replacing else None
