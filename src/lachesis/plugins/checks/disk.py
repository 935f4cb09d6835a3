"""Speed of the run directory's disk, and the duration of a checkpoint on it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lachesis.common.errors import ConfigError
from lachesis.config.schema import LachesisConfig
from lachesis.plan.plan import plan
from lachesis.plugins.checks.findings import Check

# Enough that the speed is the disk's and not that of its first moment; a slow one is given up before.
BYTES, LIMIT_S = 256 * 2**20, 8.0
_BLOCK = 4 * 2**20
_MB, _GB = 1e6, 1e9


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second of writes through to the disk and of reads from it, and the size of the test file."""

    bytes: int
    write: float
    read: float


def try_disk(config: LachesisConfig) -> Check:
    """Write and read a file in the run directory; it is gone afterwards."""
    directory = _nearest(config.run.directory)
    try:
        speed = measure(directory)
        room = shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror or error}",
            remedy="give a run.dir where this user may write and that has room",
        ) from error
    # A checkpoint is as large for any number of devices; these are the fewest that the run takes.
    planned = plan(config, devices=config.distributed.context_parallel_size)
    message = (
        f"{directory}: {speed.write / _MB:,.0f} MB/s written, {speed.read / _MB:,.0f} MB/s read, of "
        f"{speed.bytes / _MB:,.0f} MB (limit {LIMIT_S:.0f} s)"
    )
    if planned.checkpoint is None or planned.on_disk is None:
        return Check("disk speed", f"{message}; how large a checkpoint is follows from the model's config.json")
    message += f"; a checkpoint of {planned.checkpoint / _GB:.3g} GB takes {planned.checkpoint / speed.write:.1f} s"
    if planned.on_disk > room:
        raise ConfigError(
            f"{message}; what a run keeps there needs {planned.on_disk / _GB:.3g} GB, of which {room / _GB:.3g} are "
            "free",
            remedy="make room, lower checkpoint.keep_last, or give another run.dir",
        )
    return Check("disk speed", message)


def measure(directory: Path, *, size: int = BYTES, limit_s: float = LIMIT_S) -> DiskSpeed:
    """Measure the disk with a file without a name. Raises OSError if it cannot be written or reads back differently."""
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        started, written = time.perf_counter(), 0
        while written < size and (not written or time.perf_counter() - started < limit_s):
            written += file.write(block)
        os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        if hasattr(os, "posix_fadvise"):  # else it is read from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started, read = time.perf_counter(), 0
        while chunk := file.read(_BLOCK):
            if chunk != block[: len(chunk)]:
                raise OSError(f"the bytes read at {read} is not what was written there")
            read += len(chunk)
    return DiskSpeed(written, write=written / write_s, read=read / (time.perf_counter() - started))


def _nearest(path: Path) -> Path:
    """Return the directory itself, or the nearest existing one above it."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
