"""Rendezvous of the ranks of a job, and its protection against strangers.

torchrun's store listens on all interfaces without authentication: anyone who reaches its port can read and write all of
it. So it is hardly trusted.

- On one machine the ranks meet in a file that their user alone can open. They take only the file's name from torchrun's
  store, so that a stranger can at most prevent their meeting. gloo listens on the loopback.
- On several machines they meet in torchrun's store. With ``LACHESIS_JOB_TOKEN``, equal on all ranks, each rank seals
  the values it writes there.

In both cases each rank proves to every other that it has the job's secret, over the gloo connection that it uses
afterwards. NCCL gives no proof: it passes a number through the store, which is secret only on one machine.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lachesis.common.errors import ConfigError, DeadlineExceeded, TrainingError, first_line
from lachesis.common.world import HOW_TO_START, World

TOKEN_VARIABLE = "LACHESIS_JOB_TOKEN"
_NAME = re.compile(r"[0-9a-f]{32}")
_PROOF_BYTES = 32
LOOPBACK = "127.0.0.1"
_KEPT_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Job:
    """Shared state of the ranks in this attempt of a job.

    Args:
        store: of this attempt.
        whole: torchrun's store. It outlives ranks: later attempts find an earlier one's values.
        secret: unknown to strangers; empty if ranks cannot be told from strangers.
        file: where the ranks of one machine meet.
    """

    store: Store
    whole: Store
    secret: str
    file: Path | None = None

    def note_begun(self, run_dir: Path) -> None:
        """Mark the run in this directory as belonging to later attempts of this torchrun too."""
        self.whole.set(_begun_key(run_dir), "begun")


def began_before(world: World, run_dir: Path, *, limit_s: float) -> bool:
    """Return True if an earlier attempt of this torchrun began the run in this directory.

    This attempt then resumes it.
    """
    if world.restarts == 0:
        return False
    return job_store(world, limit_s=limit_s).check([_begun_key(run_dir)])


def join_job(world: World, *, limit_s: float, environment: Mapping[str, str] = os.environ) -> Job:
    """Meet the other ranks.

    Raises:
        DeadlineExceeded: torchrun's store was not there in time.
        ConfigError: the file in which ranks of one machine meet cannot be made, or others can access it.
    """
    whole = job_store(world, limit_s=limit_s)
    store, token = attempt_store(world, whole), environment.get(TOKEN_VARIABLE, "")
    if not world.one_machine:
        return Job(store, whole, token)
    file = _meeting_file(store)
    _remove_old_files(file.parent)
    private = FileStore(str(file), -1)
    return Job(private, whole, token + private.compare_set("secret", "", secrets.token_hex()).decode(), file)


def job_store(world: World, *, limit_s: float) -> Store:
    """Return torchrun's store, of the whole job.

    Raises:
        DeadlineExceeded: it was not there in time.
    """
    try:
        store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=limit_s))))
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"rank {world.rank} of {world.size} did not reach torchrun's store: {first_line(error)}",
            remedy=f"start all ranks with {HOW_TO_START}",
        ) from error
    return store


def attempt_store(world: World, store: Store) -> Store:
    """Return the part of the job's store for this attempt.

    After a restart the earlier attempt's addresses are dead.
    """
    return PrefixStore(f"lachesis/attempt/{world.restarts}", store)


def seal(secret: str, key: str, value: str) -> str:
    """Return the value with a proof that its writer under this key has the secret."""
    return f"{_mac(secret, f'{key}={value}'.encode()).hex()} {value}"


def unseal(secret: str, key: str, sealed: str) -> str:
    """Return the value that was sealed.

    Raises TrainingError if a stranger has written it.
    """
    value = sealed.partition(" ")[2]
    if not hmac.compare_digest(sealed.encode(), seal(secret, key, value).encode()):
        raise TrainingError(
            f"the store's value of {key} was not written by a rank of this job",
            remedy=f"set {TOKEN_VARIABLE} to the same on all machines; if it is, a stranger can reach torchrun's port",
        )
    return value


def prove(group: Any, *, rank: int, size: int, secret: str, limit_s: float, name: Callable[[int], str]) -> None:
    """Prove to every other rank that this one has the secret, and verify theirs, over this group's connections.

    Args:
        group: a process group of gloo.
        name: of a rank, for errors.

    Raises:
        TrainingError: a rank does not have it.
        DeadlineExceeded: not all have shown it in time.
    """
    others = [other for other in range(size) if other != rank]
    challenges = {other: secrets.token_bytes(_PROOF_BYTES) for other in others}
    try:
        asked = _exchange(group, challenges, tag=_CHALLENGE, limit_s=limit_s)
        answers = {other: _mac(secret, b"%d to %d:" % (rank, other) + asked[other]) for other in others}
        found = _exchange(group, answers, tag=_ANSWER, limit_s=limit_s)
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"not all others proved to rank {rank} of {size} that they belong to this job: {first_line(error)}",
            remedy="check if one of them has ended or refuses another",
        ) from error
    for other in others:
        if not hmac.compare_digest(found[other], _mac(secret, b"%d to %d:" % (other, rank) + challenges[other])):
            raise TrainingError(
                f"{name(other)} does not have the secret of this job",
                remedy=f"set {TOKEN_VARIABLE} to the same on all machines; if it is, that is a stranger",
            )


@contextmanager
def on_loopback(*, wanted: bool) -> Iterator[None]:
    """Make gloo groups that are created within the block listen on the loopback only.

    A network interface named in the environment takes precedence.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if not wanted or loopback is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


# Tags of messages of gloo; others of ours begin at 1.
_CHALLENGE, _ANSWER = 101, 102


def _exchange(group: Any, sent: Mapping[int, bytes], *, tag: int, limit_s: float) -> dict[int, bytes]:
    """Send each other rank its bytes, and receive equally many from each."""
    received: dict[int, Tensor] = {other: torch.empty(_PROOF_BYTES, dtype=torch.uint8) for other in sent}
    buffers = {other: torch.frombuffer(bytearray(data), dtype=torch.uint8) for other, data in sent.items()}
    works = [group.recv([tensor], other, tag) for other, tensor in received.items()]
    works += [group.send([tensor], other, tag) for other, tensor in buffers.items()]
    for work in works:
        work.wait(timedelta(seconds=limit_s))
    return {other: tensor.numpy().tobytes() for other, tensor in received.items()}


def _mac(secret: str, message: bytes) -> bytes:
    return hmac.digest(secret.encode(), message, "sha256")


def _meeting_file(store: Store) -> Path:
    """Return the path of this attempt's meeting file, whose name all ranks agree on in torchrun's store."""
    name = store.compare_set("file", "", secrets.token_hex(16)).decode()
    if not _NAME.fullmatch(name):
        raise TrainingError(
            f"torchrun's store names {name[:40]!r} as the meeting file of the ranks, but no rank wrote that",
            remedy="check who can reach torchrun's port",
        )
    return _private_directory() / name


def _private_directory() -> Path:
    """Return a directory that only this user can access on this machine.

    Files of a store are locked, which not every network file system supports.

    Raises:
        ConfigError: it cannot be created, or another user can write to it.
    """
    directory = Path(tempfile.gettempdir()) / f"lachesis-jobs-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(
            f"{directory}, where the ranks of a job meet, cannot be created: {error.strerror}",
            remedy="set TMPDIR to a writable directory of this machine",
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory}, where the ranks of a job meet, is open to other users",
            remedy="remove it, or set TMPDIR to another directory",
        )
    return directory


def _remove_old_files(directory: Path) -> None:
    """Remove the files of old jobs.

    A job's file stays when it ends: NCCL's threads look into theirs until their process is gone.
    """
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # another rank was first
            found = path.lstat()
            if time.time() - max(found.st_atime, found.st_mtime) > _KEPT_S:
                path.unlink()


def _begun_key(run_dir: Path) -> str:
    return f"lachesis/begun/{run_dir.resolve()}"
