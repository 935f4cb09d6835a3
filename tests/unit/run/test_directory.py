from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import CheckpointError, ConfigError, RunRemoved
from lachesis.common.types import StepRecord
from lachesis.run.directory import LEFT_BEHIND, RunDirectory, claim_run, only_trainer
from lachesis.run.sinks import StateSink
from lachesis.transport.bridge_file import BRIDGE_FILE
from tests import warm

# No process can have it.
NO_PROCESS = 2**30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "first"


def claim(path: Path, *, resume: bool = False, overwrite: bool = False) -> RunDirectory:
    return claim_run(path, resume=resume, overwrite=overwrite)


def start(path: Path, **how: bool) -> RunDirectory:
    run = claim(path, **how)
    run.begin(resume=how.get("resume", False))
    return run


def state_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text())


def held_run(path: Path, **state: Any) -> None:
    """A run that another process left (or still works on), with a file that must not get lost."""
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"status": "finished", "pid": 1, "step": 12} | state))
    (path / "metrics.jsonl").write_text("{}\n")


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def trainer() -> Iterator[int]:
    """The id of a process that looks like a running `lachesis train`."""
    code = "import time; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, "lachesis", "train"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"  # before, it may not have its name yet
    yield process.pid
    process.terminate()
    process.communicate()


@pytest.fixture
def stranger() -> Iterator[int]:
    """The id of a process of another program."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.terminate()
    process.wait()


class TestANewRun:
    def test_claiming_writes_nothing(self, path: Path):
        claim(path)
        assert not path.parent.exists()

    def test_beginning_makes_the_directory_and_says_who_works_there(self, path: Path):
        start(path)
        state = state_of(path)
        assert (state["status"], state["pid"]) == ("starting", os.getpid())
        assert (path / "logs").is_dir()

    def test_state_is_changed_key_by_key(self, path: Path):
        run = start(path)
        run.update(status="running", step=3)
        run.update(step=4)
        state = state_of(path)
        assert (state["status"], state["step"], state["pid"]) == ("running", 4, os.getpid())
        assert state["updated"] >= state["started"]

    def test_an_empty_directory_may_be_used(self, path: Path):
        path.mkdir(parents=True)
        start(path)
        assert state_of(path)["status"] == "starting"

    def test_files_are_those_of_the_run_directory(self, path: Path):
        files = RunDirectory(path).files
        assert files["metrics"] == path / "metrics.jsonl"
        assert files["checkpoints"] == path / "checkpoints"
        assert {file.parent for file in files.values()} == {path}


class TestARunThatIsThere:
    def test_it_is_not_touched_without_being_told(self, path: Path):
        held_run(path)
        before = content(path)
        with pytest.raises(ConfigError, match=r"holds a run already \(finished at step 12\)") as caught:
            claim(path)
        assert "--resume" in caught.value.remedy
        assert "--overwrite" in caught.value.remedy
        assert content(path) == before

    @pytest.mark.parametrize("status", ["failed", "stopped", "running"])
    def test_one_that_ended_before_its_first_step_leaves_the_directory_free(self, path: Path, status: str):
        held_run(path, status=status, step=0, pid=NO_PROCESS, host=socket.gethostname())
        (path / "metrics.jsonl").write_text("")
        for left in (
            "adapters/v0/adapter_model.safetensors",
            "exports/v0/model.safetensors",
            "checkpoints/step_000000/w",
        ):
            (path / left).parent.mkdir(parents=True, exist_ok=True)
            (path / left).write_text("as it began")
        start(path)
        assert state_of(path)["status"] == "starting" and not (path / "checkpoints").exists()

    @pytest.mark.parametrize("kept", ["checkpoints/step_1/weights", "final/model", "thesis.tex"])
    def test_what_it_left_besides_is_kept(self, path: Path, kept: str):
        held_run(path, status="failed", step=0)
        (path / "metrics.jsonl").write_text("")
        (path / kept).parent.mkdir(parents=True, exist_ok=True)
        (path / kept).write_text("ten years")
        with pytest.raises(ConfigError, match="holds a run already"):
            claim(path)

    def test_a_step_that_only_the_metrics_know_counts(self, path: Path):
        held_run(path, status="failed", step=0)
        line = {"type": "step", "step": 1, "time": 0.0, "values": {}}
        (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(ConfigError, match="holds a run already"):
            claim(path)

    def test_a_run_of_another_machine_may_go_on(self, path: Path):
        held_run(path, status="running", step=0, host="elsewhere")
        (path / "metrics.jsonl").write_text("")
        with pytest.raises(ConfigError, match="holds a run already"):
            claim(path)

    def test_overwriting_deletes_it_only_when_the_new_run_begins(self, path: Path):
        held_run(path)
        before = content(path)
        run = claim(path, overwrite=True)
        assert content(path) == before
        run.begin(resume=False)
        assert set(content(path)) == {"state.json"}
        assert "step" not in state_of(path), "nothing of the old run's state remains"

    def test_resuming_keeps_its_files_and_its_beginning(self, path: Path):
        held_run(path, started=5.0, status="stopped")
        start(path, resume=True)
        state = state_of(path)
        assert (state["status"], state["started"], state["step"]) == ("starting", 5.0, 12)
        assert (path / "metrics.jsonl").is_file()

    def test_a_finished_run_without_a_checkpoint_is_not_resumed_over(self, path: Path):
        held_run(path)
        (path / "rollouts").mkdir()
        before = content(path)
        with pytest.raises(ConfigError, match="finished at step 12 and has no checkpoint to resume from"):
            claim(path, resume=True)
        assert content(path) == before
        (path / "checkpoints" / "step_000012").mkdir(parents=True)
        claim(path, resume=True)

    def test_resuming_removes_what_it_was_writing_when_it_was_killed(self, path: Path):
        run = start(path)
        run.update(step=3)
        run.files["evaluations"].mkdir()
        half = [path / ".report.html.4711-140.tmp", run.files["evaluations"] / ".step_000003.jsonl.4711-140.tmp"]
        whole = [run.files["evaluations"] / "step_000002.jsonl", path / "notes.tmp"]
        for written in (*half, *whole):
            written.write_text("{")
        start(path, resume=True)
        assert not any(written.exists() for written in half)
        assert all(written.exists() for written in whole)

    def test_an_error_of_before_is_forgotten_when_it_goes_on(self, path: Path):
        held_run(path, status="failed", error="the disk was full")
        start(path, resume=True)
        assert "error" not in state_of(path)

    def test_there_must_be_something_to_resume(self, path: Path):
        with pytest.raises(ConfigError, match="no run to resume") as caught:
            claim(path, resume=True)
        assert "--resume" in caught.value.remedy

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_other_files_are_never_deleted(self, path: Path, overwrite: bool):
        path.mkdir(parents=True)
        (path / "thesis.tex").write_text("ten years")
        with pytest.raises(ConfigError, match="not empty and holds no run"):
            claim(path, overwrite=overwrite)
        assert (path / "thesis.tex").read_text() == "ten years"

    def test_what_a_run_that_was_not_built_left_behind_is_in_nobodys_way(self, path: Path):
        assert LEFT_BEHIND == BRIDGE_FILE
        path.mkdir(parents=True)
        (path / LEFT_BEHIND).write_text("{}")
        claim(path).begin(resume=False)
        assert not (path / LEFT_BEHIND).exists()

    def test_a_file_in_its_place_is_refused(self, path: Path):
        path.parent.mkdir()
        path.write_text("")
        with pytest.raises(ConfigError, match="is a file"):
            claim(path, overwrite=True)

    @pytest.mark.parametrize("text", ["{", "\0\0\0"])
    def test_a_state_that_cannot_be_read_is_an_error(self, path: Path, text: str):
        held_run(path)
        (path / "state.json").write_text(text)
        with pytest.raises(ConfigError, match=r"state.json cannot be read") as caught:
            claim(path, resume=True)
        assert caught.value.remedy

    @pytest.mark.parametrize("text", ["{", "[]", "\0\0", None])
    def test_checkpoints_go_on_without_their_state(
        self, path: Path, text: str | None, caplog: pytest.LogCaptureFixture
    ):
        held_run(path)
        (path / "checkpoints" / "step_000004").mkdir(parents=True)
        if text is None:
            (path / "state.json").unlink()
        else:
            (path / "state.json").write_text(text)
        run = claim(path, resume=True)
        run.begin(resume=True)
        assert "state.json is" in caplog.text and state_of(path)["status"] == "starting"
        assert (path / "checkpoints" / "step_000004").is_dir()

    def test_a_damaged_run_may_be_overwritten(self, path: Path):
        held_run(path)
        (path / "state.json").write_text("{")
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            claim(path)
        assert caught.value.remedy == "start over with --overwrite"
        (path / "checkpoints" / "step_000004").mkdir(parents=True)
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            claim(path)
        assert caught.value.remedy == "resume from the checkpoints with --resume, or start over with --overwrite"
        start(path, overwrite=True)

    def test_beginning_anew_keeps_the_directory_itself(self, path: Path):
        """It may be a mount point, which can be emptied and not removed."""
        held_run(path)
        (path / "checkpoints" / "step_000004").mkdir(parents=True)
        (path / "link").symlink_to(path.parent)
        before = path.stat().st_ino
        claim(path, overwrite=True).begin(resume=False)
        assert path.stat().st_ino == before and path.parent.is_dir()
        assert {entry.name for entry in path.iterdir()} == {"logs", "state.json"}

    def test_a_directory_removed_in_mid_run_is_said_and_not_made_again(self, path: Path):
        run = start(path)
        shutil.rmtree(path)
        with pytest.raises(CheckpointError, match="was removed during the run"):
            run.update(step=3)
        assert not path.exists()

    @pytest.mark.parametrize("what", ["all", "all, and made again", "the metrics", "nothing"])
    def test_what_was_removed_of_it_is_seen_at_the_next_step(self, path: Path, what: str):
        run = start(path)
        run.files["metrics"].touch()
        sink = StateSink(run)
        sink.write(StepRecord(1, {}))
        if what.startswith("all"):
            shutil.rmtree(path)
        if what.endswith("again"):  # as a checkpoint would
            held_run(path)
        if what == "the metrics":
            run.files["metrics"].unlink()
        if what == "nothing":
            return sink.write(StepRecord(2, {}))
        with pytest.raises(RunRemoved, match="was removed during the run"):
            sink.write(StepRecord(2, {}))


HOLDS = """
import sys
from pathlib import Path
from lachesis.run.directory import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


class TestOneTrainer:
    @pytest.mark.parametrize("exists", [False, True])
    def test_of_two_that_start_at_once_one_is_refused(self, path: Path, exists: bool):
        if exists:
            path.mkdir(parents=True)
        words = [sys.executable, "-c", HOLDS, str(path)]
        with warm.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None and first.stdout.readline() == "held\n"
            refused = rf"process {first.pid} is starting or training a run in {path}"
            with pytest.raises(ConfigError, match=refused), only_trainer(path):
                pass
            first.kill()
        with only_trainer(path):
            pass
        assert path.exists() == exists and not list(path.parent.glob(".*"))

    def test_nothing_is_left_of_one_that_writes_nothing(self, tmp_path: Path):
        with only_trainer(tmp_path / "new" / "runs" / "one"):
            pass
        assert not list(tmp_path.iterdir())

    def test_a_directory_beside_which_nothing_can_be_written_is_locked_itself(self, path: Path, monkeypatch):
        path.mkdir(parents=True)
        real = os.open

        def refuse(name: Any, flags: int, *args: Any, **how: Any) -> int:
            if str(name).endswith(".lock"):
                raise PermissionError(13, "Permission denied")
            return real(name, flags, *args, **how)

        monkeypatch.setattr(os, "open", refuse)
        with only_trainer(path), pytest.raises(ConfigError, match="right now"), only_trainer(path):
            pass


class TestWhoWorksThere:
    @pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}], ids=["plain", "resume", "overwrite"])
    @pytest.mark.parametrize("status", ["starting", "running"])
    def test_a_run_in_progress_is_left_alone(self, path: Path, trainer: int, status: str, how: dict[str, bool]):
        held_run(path, status=status, pid=trainer)
        before = content(path)
        with pytest.raises(ConfigError, match=f"process {trainer} is training in .* right now"):
            claim(path, **how)
        assert content(path) == before

    def test_one_that_has_ended_its_run_is_no_hindrance(self, path: Path, trainer: int):
        held_run(path, status="stopped", pid=trainer)
        claim(path, resume=True)

    def test_another_program_that_has_the_id_by_now_is_no_hindrance(self, path: Path, stranger: int):
        held_run(path, status="running", pid=stranger)
        claim(path, resume=True)

    def test_a_process_that_is_gone_is_no_hindrance(self, path: Path):
        process = subprocess.Popen([sys.executable, "-c", "", "lachesis"])
        process.wait()
        held_run(path, status="running", pid=process.pid)
        claim(path, resume=True)

    def test_a_killed_one_that_nobody_has_collected_is_no_hindrance(self, path: Path):
        """Where the first process of a container collects none, it stays in the table for good."""
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            held_run(path, status="running", pid=process.pid, began=time.time())
            with pytest.raises(ConfigError, match="is training in"):
                claim(path, resume=True)
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays uncollected
            claim(path, resume=True)
        finally:
            process.kill()
            process.communicate()

    @pytest.mark.parametrize("pid", [None, "12", [1]])
    def test_a_state_without_an_id_is_no_hindrance(self, path: Path, pid: object):
        held_run(path, status="running", pid=pid)
        claim(path, resume=True)


def test_a_place_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path):
    (tmp_path / "runs").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        start(tmp_path / "runs" / "first")
    assert "run.dir" in caught.value.remedy
