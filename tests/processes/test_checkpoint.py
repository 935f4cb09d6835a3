"""A checkpoint while its disk is full, and while its process is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LONG_S

FULL_DISK = """
import os, sys, torch
from pathlib import Path
from lachesis.common.errors import CheckpointError
from lachesis.train import checkpoint

disk = Path(sys.argv[1])
manager = checkpoint.CheckpointManager(disk / "checkpoints", keep_last=2)
def save(step, weights, state):
    manager.save(step, tensors={"w": torch.zeros(weights)}, state={"s": torch.zeros(state)}, meta={})
save(1, 100_000, 100_000)
checkpoint._require_space = lambda *args, **kwargs: None  # as if another program wrote at the same time
for weights, state in ((2_000_000, 1), (1, 2_000_000)):
    try:
        save(2, weights, state)
    except CheckpointError as error:
        assert "no space left" in str(error), error
    else:
        raise AssertionError("the disk was not full")
    assert os.listdir(disk / "checkpoints") == ["step_000001"]
class Model:
    def save_pretrained(self, directory):
        Path(directory, "config.json").write_bytes(bytes(8_000_000))
try:
    checkpoint.save_model(Model(), None, disk / "final")
except CheckpointError as error:
    assert "no space left" in str(error), error
assert os.listdir(disk) == ["checkpoints"]
assert manager.load().step == 1
"""


def test_really_full_disk(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=4m none {tmp_path}"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    command = [unshare, "-rm", "sh", "-c", f'{mount} && exec "$0" "$@"']
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=4 * LONG_S
    )
    assert done.returncode == 0, done.stderr


# Kills the saving process at every system call that a crash could fall between, and looks at what is left.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from lachesis.train.checkpoint import CheckpointManager

torch.set_num_threads(1)
good = Path(sys.argv[1]) / "good"

def save(directory, step, value):
    content = torch.full((999,), value)
    CheckpointManager(directory, keep_last=1).save(
        step, tensors={"w": content}, state={"v": content}, meta={"v": value}
    )

def die_at(moment):
    left = [moment]
    def wrap(function):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return counted
    for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
        setattr(os, name, wrap(getattr(os, name)))

save(good, 7, 1.0)
results = []
for step in (7, 8):  # the same step again, and the next one
    for moment in range(100):
        directory = Path(sys.argv[1]) / f"{step}-{moment}"
        shutil.copytree(good, directory)
        child = os.fork()
        if child == 0:
            die_at(moment)
            save(directory, step, 2.0)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found = CheckpointManager(directory, keep_last=1).load()
        values = {found.meta["v"], *found.tensors["w"].tolist(), *found.state["v"].tolist()}
        save(directory, 9, 3.0)
        results.append([step, moment, killed, found.step, sorted(values), sorted(os.listdir(directory))])
        if not killed:
            break
print(json.dumps(results))
"""


def test_killed_at_any_moment_of_saving_a_good_checkpoint_is_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=4 * LONG_S
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert sum(killed for _, _, killed, *_ in results) > 20
    assert [step for step, _, killed, *_ in results if not killed] == [7, 8]
    for step, _, killed, found, values, left in results:
        assert (found, values) in ([(7, [1.0]), (step, [2.0])] if killed else [(step, [2.0])])
        assert left == ["step_000009"]
    assert {tuple(values) for _, _, _, _, values, _ in results} == {(1.0,), (2.0,)}
