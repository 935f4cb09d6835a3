"""Runs that fail half-way: what was trained until the last checkpoint is there, and goes on as if nothing had been."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import warm
from tests.e2e.runs import (
    Main,
    checkpoints,
    environment,
    files,
    metrics,
    run_here,
    state,
    write_reward,
    write_run,
)
from tests.e2e.test_resume import assert_equal_runs
from tests.waiting import LONG_S

STEPS = {"run": {"steps": 8}, "checkpoint": {"every_steps": 2, "save_final": True}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    return run_here(write_run(tmp_path_factory.mktemp("straight"), **STEPS)).run_dir


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes, as where a quota or a disk ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_reward_that_fails_late_loses_nothing_before_the_last_checkpoint(main: Main, tmp_path: Path, straight: Path):
    broken = tmp_path / "broken"
    body = f"""
if call == 6 and os.path.exists({str(broken)!r}):
    raise KeyError("answer")
return shares
"""
    config = write_run(tmp_path, **STEPS, rewards={"functions": [write_reward(tmp_path, body)]})
    broken.touch()
    outcome = main("train", config)
    assert outcome.code == 4
    assert len(outcome.errors) == 1
    run_dir = tmp_path / "runs" / "proof"
    assert checkpoints(run_dir) == ["step_000002", "step_000004"]
    assert [line.step for line in metrics(run_dir).steps] == [1, 2, 3, 4, 5]
    assert (state(run_dir)["status"], state(run_dir)["step"]) == ("failed", 5)
    assert "KeyError: 'answer'" in state(run_dir)["error"]
    assert (run_dir / "report.html").is_file()

    broken.unlink()
    resumed = main("train", config, "--resume")
    assert resumed.code == 0
    assert state(run_dir)["status"] == "finished"
    assert "error" not in state(run_dir)
    assert_equal_runs(run_dir, straight)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(main: Main, tmp_path: Path, straight: Path):
    config = write_run(tmp_path, **STEPS)
    run_dir = run_here(config, stop_after=4).run_dir
    before = files(run_dir / "checkpoints")
    largest = max(len(content) for _, content in before.values())
    with files_up_to(largest - 1000):
        outcome = main("train", config, "--resume")
    assert outcome.code == 9
    (line,) = outcome.errors
    assert "step_000006 cannot be written: " in line
    assert "File too large" in line
    assert " -> " in line
    assert files(run_dir / "checkpoints") == before
    assert main("train", config, "--resume").code == 0
    assert_equal_runs(run_dir, straight)


def test_a_final_model_that_cannot_be_written_can_be_had_later(main: Main, tmp_path: Path, straight: Path):
    config = write_run(tmp_path, **STEPS)
    run_dir = run_here(config, stop_after=6).run_dir
    model = max(path.stat().st_size for path in (straight / "final").glob("*.safetensors"))
    with files_up_to(model - 1000):
        assert main("train", config, "--resume", "--set=checkpoint.every_steps=0").code == 9
    assert not (run_dir / "final").exists()
    assert main("train", config, "--resume").code == 0
    assert_equal_runs(run_dir, straight)


# In namespaces of its own, as root of them, a process may mount a disk of any size.
FULL_DISK = """
import ctypes, os, sys
from lachesis import cli

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
assert ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWUSER) == 0
for name, value in maps.items():
    with open(f"/proc/self/{name}", "w") as file:
        file.write(value)

def lachesis(*arguments):
    sys.argv = ["lachesis", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        print("code", end.code or 0, flush=True)

config, runs, out, size = sys.argv[1:]
assert os.system(f"mount -t tmpfs -o size={size} tmpfs {runs}") == 0
lachesis("train", config)
assert os.system(f"cp -r {runs} {out}/full && mount -o remount,size=30m {runs}") == 0
lachesis("train", config, *(["--resume"] if os.path.exists(f"{runs}/proof/state.json") else []))
assert os.system(f"cp -r {runs} {out}/after") == 0
"""


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


ANOTHER_SIZE = pytest.mark.long(
    "test_a_full_disk_stops_the_run_and_it_goes_on_once_there_is_room[at the second checkpoint]: with less room"
)


@pytest.mark.skipif(not may_mount(), reason="mounting is not permitted here")
@pytest.mark.parametrize(
    ("size", "kept"),
    [
        pytest.param("1700k", ["step_000002"], id="at the second checkpoint"),
        pytest.param("60k", [], id="before the first", marks=ANOTHER_SIZE),
        pytest.param("4k", [], id="at once", marks=ANOTHER_SIZE),
    ],
)
def test_a_full_disk_stops_the_run_and_it_goes_on_once_there_is_room(
    tmp_path: Path, straight: Path, size: str, kept: list[str]
):
    config = write_run(tmp_path, **STEPS)
    runs = tmp_path / "runs"
    runs.mkdir()
    words = [sys.executable, "-c", FULL_DISK, config, runs, tmp_path, size]
    done = warm.run(words, env=environment(), timeout=4 * LONG_S)
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    assert codes == ["code 9", "code 0"], done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "no space left" in error.lower()
    assert "free space on that disk" in error
    assert "Traceback" not in done.stderr
    assert checkpoints(tmp_path / "full" / "proof") == kept
    for name in kept:
        assert load_file(tmp_path / "full" / "proof" / "checkpoints" / name / "weights.safetensors")
    assert_equal_runs(tmp_path / "after" / "proof", straight)


@pytest.mark.parametrize(
    "change",
    [["--set=adapter.kind=lora"], ["--set=data.path=other.jsonl"]],
    ids=["another adapter", "another dataset"],
)
def test_resuming_with_something_else_is_refused_and_spoils_nothing(
    main: Main, tmp_path: Path, straight: Path, change: list[str]
):
    config = write_run(tmp_path, **STEPS)
    (tmp_path / "other.jsonl").write_text('{"prompt": "ab"}\n' * 20)
    run_dir = run_here(config, stop_after=3).run_dir
    before = files(run_dir)
    outcome = main("train", config, "--resume", *change)
    assert outcome.code == 9
    assert len(outcome.errors) == 1
    assert "resume with" in outcome.errors[0].partition(" -> ")[2]
    after = files(run_dir)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"state.json", "logs/trainer.log"}
    assert main("train", config, "--resume").code == 0
    assert_equal_runs(run_dir, straight)


def test_a_reader_that_goes_does_not_stop_the_training(tmp_path: Path, straight: Path):
    """As in `lachesis train config.yaml | head -1`."""
    config = write_run(tmp_path, **STEPS)
    process = warm.Popen(
        [sys.executable, "-c", "from lachesis.cli import main; main()", "train", str(config)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1/8")
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    process.wait(LONG_S)
    assert "Traceback" not in said
    assert_equal_runs(tmp_path / "runs" / "proof", straight)
