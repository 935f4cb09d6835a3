"""Where ranks meet, and strangers who reach torchrun's store or the ranks' own ports."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lachesis.common.errors import ConfigError, LachesisError, TrainingError
from lachesis.common.world import World
from lachesis.train.distributed.control import ControlGroup
from lachesis.train.distributed.job import TOKEN_VARIABLE, Job, attempt_store, began_before, join_job, seal, unseal
from lachesis.train.distributed.messages import Turn

LIMIT_S = 10.0


def world(rank: int, *, size: int = 2, one_machine: bool = True, restarts: int = 0) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size, restarts=restarts, one_machine=one_machine)


@pytest.fixture
def torchruns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dist.TCPStore:
    """torchrun's store, which ranks find by what it sets. They meet in a directory of this test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": 2}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    return store


def both(call: Any) -> list[Any]:
    """What it gives for rank 0 and 1, or the error that it raises."""

    def one(rank: int) -> Any:
        try:
            return call(rank)
        except LachesisError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


def joined(rank: int, token: str = "", **options: Any) -> Job:
    return join_job(world(rank, **options), limit_s=LIMIT_S, environment={TOKEN_VARIABLE: token})


def met(rank: int, *jobs: Job, one_machine: bool = True) -> ControlGroup:
    job = jobs[rank]
    return ControlGroup(world(rank, one_machine=one_machine), job.store, limit_s=LIMIT_S, secret=job.secret)


def told(groups: list[ControlGroup]) -> Turn:
    _, heard = both(lambda rank: groups[rank].broadcast(Turn(3, "step") if rank == 0 else None))
    return heard


def test_on_one_machine_what_a_stranger_writes_into_torchruns_store_is_not_believed(torchruns, tmp_path: Path):
    jobs = both(joined)
    stranger = dist.TCPStore("127.0.0.1", torchruns.port, is_master=False, timeout=timedelta(seconds=5))
    wrong = seal("", "rank/0", '["the stranger", 0.001]')
    for key in ("rank/0", "rank/1", "control/0/rank_0", "control/0/0", "secret"):
        stranger.set(f"lachesis/attempt/0/{key}", wrong)
    groups = both(lambda rank: met(rank, *jobs))
    assert "(process " in groups[1].name(0)
    assert groups[1].limit_s == LIMIT_S
    assert told(groups) == Turn(3, "step")
    # What they meet by is not in the store, nor open to other users than their user.
    assert [key for key in stranger.list_keys() if "control" in key and stranger.get(key) != wrong.encode()] == []
    assert jobs[0].secret == jobs[1].secret
    assert jobs[0].secret not in {stranger.get(key).decode() for key in stranger.list_keys() if "attempt" in key}
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_files_of_jobs_long_ago_are_removed(torchruns):
    first, _ = both(joined)
    assert first.file is not None
    long_ago = time.time() - 40 * 86_400
    os.utime(first.file, (long_ago, long_ago))
    again, _ = both(lambda rank: joined(rank, restarts=1))
    assert again.file is not None
    assert list(again.file.parent.iterdir()) == [again.file]


def test_each_attempt_meets_anew_and_knows_that_the_run_is_its_own(torchruns, tmp_path: Path):
    first, _ = both(joined)
    first.note_begun(tmp_path)
    again, other = both(lambda rank: joined(rank, restarts=1))
    assert again.file == other.file != first.file
    assert began_before(world(0, restarts=1), tmp_path, limit_s=LIMIT_S)
    assert not began_before(world(0, restarts=1), tmp_path / "another", limit_s=LIMIT_S)
    assert not began_before(world(0), tmp_path, limit_s=LIMIT_S)


@pytest.mark.parametrize("name", ["../../home/user/.bashrc", "f" * 31])
def test_a_file_that_no_rank_has_named_is_refused(torchruns, name: str):
    torchruns.set("lachesis/attempt/0/file", name)
    with pytest.raises(TrainingError, match="no rank wrote"):
        joined(0)


def test_a_directory_that_others_can_open_is_refused(torchruns, tmp_path: Path):
    jobs = both(joined)
    assert jobs[0].file is not None
    jobs[0].file.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        joined(0)


def test_with_a_token_ranks_of_several_machines_meet_in_torchruns_store(torchruns):
    jobs = both(lambda rank: joined(rank, "the token", one_machine=False))
    assert jobs[0].file is None
    assert told(both(lambda rank: met(rank, *jobs, one_machine=False))) == Turn(3, "step")


def test_who_has_no_token_is_refused_by_what_it_says_of_itself(torchruns):
    jobs = [joined(rank, "the token" if rank == 0 else "another", one_machine=False) for rank in range(2)]
    errors = both(lambda rank: met(rank, *jobs, one_machine=False))
    assert [type(error) for error in errors] == [TrainingError, TrainingError]
    assert "the store's value of rank/1 was not written by a rank of this job" in errors[0].message
    assert TOKEN_VARIABLE in errors[0].remedy


def test_who_has_no_token_is_refused_by_its_connection(monkeypatch: pytest.MonkeyPatch):
    """A stranger that has found its way to a rank's port, and says of itself what a rank has said."""
    believed = "lachesis.train.distributed.control.unseal"
    monkeypatch.setattr(believed, lambda secret, key, sealed: sealed.partition(" ")[2])
    store = attempt_store(world(0), dist.HashStore())
    jobs = [Job(store, store, secret) for secret in ("the token", "")]
    errors = both(lambda rank: met(rank, *jobs))
    assert "rank 1 (process " in errors[0].message
    assert all("does not have the secret of this job" in error.message for error in errors)


def test_what_is_sealed_is_of_its_key():
    assert unseal("secret", "rank/1", seal("secret", "rank/1", "a value")) == "a value"
    for sealed in (seal("secret", "rank/0", "a value"), seal("", "rank/1", "a value"), "a value", ""):
        with pytest.raises(TrainingError, match="rank/1 was not written by a rank"):
            unseal("secret", "rank/1", sealed)


def test_gloo_listens_on_the_loopback_of_one_machine(torchruns, monkeypatch: pytest.MonkeyPatch):
    bound: list[str] = []
    gloo = dist.ProcessGroupGloo
    make = gloo.create_device
    monkeypatch.setattr(gloo, "create_device", lambda **where: bound.append(where["hostname"]) or make(**where))
    jobs = both(joined)
    both(lambda rank: met(rank, *jobs))
    assert bound == [socket.gethostbyname("localhost")] * 2
