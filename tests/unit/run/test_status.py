from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from lachesis import cli
from lachesis.common.deadline import Deadline, Wait, waits_now, waits_writers
from lachesis.common.errors import ConfigError, DataError
from lachesis.engines.fleet import EngineRow, State
from lachesis.run import directory as rundir
from lachesis.run.directory import RunDirectory, live_file
from lachesis.run.status import RunStatus, read_status, status_json, status_lines
from tests.logs import handlers_kept
from tests.waiting import LONG_S, until

NOW = float(round(time.time()))
WAIT = {
    "name": "the trainer's wait for a batch of 4 sequences from http://here:8002",
    "since": NOW - 90,
    "limit_s": 3000.0,
    "setting": "source.wait_s",
    "background": False,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run of this very process, at step 2 of 10."""
    run = RunDirectory(tmp_path / "run")
    run.begin(resume=False)
    run.update(status="running", step=2, steps=10)
    (run.path / "logs" / "trainer.log").write_text("")
    return run.path


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which does nothing."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def change(path: Path, **state: Any) -> None:
    file = path / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | state))


def metrics(path: Path, *steps: int, **values: float | None) -> None:
    values = {"reward": 0.5, "loss": 0.25, "step_time": 4.0, "train_time": 1.0, "weight_version": 1.0} | values
    finding = {"level": "warning", "rule": "entropy", "message": "entropy is low"}
    with (path / "metrics.jsonl").open("a") as file:
        for step in steps:
            line = {"type": "step", "step": step, "time": NOW - 5, "values": values, "findings": [finding]}
            file.write(json.dumps(line) + "\n")


def live(path: Path, *waits: dict[str, Any], **facts: Any) -> None:
    content = {"pid": os.getpid(), "time": NOW - 20, "waits": list(waits)} | facts
    (path / "live.json").write_text(json.dumps(content))


def text(status: RunStatus) -> str:
    return "\n".join(f"{title:<11}{line}" for title, line in status_lines(status, now=NOW))


class TestALiveRun:
    def test_it_says_who_works_there_and_how_far_it_is(self, path: Path):
        change(path, began=NOW - 40, updated=NOW - 30)
        metrics(path, 1, 2, 3)
        (path / "checkpoints" / "step_000009").mkdir(parents=True)
        (path / "checkpoints" / "step_000010").mkdir()
        (path / "checkpoints" / ".tmp-step_000011").mkdir()
        status = read_status(path, now=NOW)
        assert (status.state, status.goes_on, status.note, status.error) == ("running", True, "", "")
        assert (status.pid, status.host) == (os.getpid(), socket.gethostname())
        assert (status.step, status.steps) == (3, 10)  # state.json lags behind by up to a second
        assert (status.weight_version, status.elapsed_s, status.silent_s) == (1, 40.0, 5.0)
        assert status.remaining_s == 7 * 4.0
        assert status.checkpoint == path / "checkpoints" / "step_000010"
        assert status.logs == (path / "logs" / "trainer.log",)
        assert [finding.message for finding in status.findings] == ["entropy is low"]

    def test_every_rule_has_its_last_word_and_what_was_resolved_says_so(self, path: Path):
        told = [
            [
                {"level": "note", "rule": "entropy", "message": "high"},
                {"level": "problem", "rule": "kl", "message": "far"},
            ],
            [{"level": "warning", "rule": "cut", "message": "cut off"}],
            [{"level": "problem", "rule": "kl", "message": "far", "resolved": 2}],
            [],
        ]
        with (path / "metrics.jsonl").open("a") as file:
            for step, findings in enumerate(told, start=1):
                line = {"type": "step", "step": step, "time": NOW, "values": {}, "findings": findings}
                file.write(json.dumps(line) + "\n")
        found = [finding.line for finding in read_status(path, now=NOW).findings]
        assert found == ["warning: cut off", "note: high", "resolved at step 2: far"]

    def test_the_expected_time_is_from_the_last_twenty_steps(self, path: Path):
        metrics(path, 1, step_time=1000.0)
        metrics(path, *range(2, 22), step_time=3.0)
        change(path, steps=31)
        assert read_status(path).remaining_s == pytest.approx(30.0)

    def test_before_the_first_step_little_is_known(self, path: Path):
        change(path, status="starting", step=0)
        status = read_status(path)
        assert (status.state, status.step, status.weight_version) == ("loading", 0, None)
        assert (status.remaining_s, status.checkpoint, status.waits) == (None, None, None)
        assert "checkpoint none yet" in text(status) and status.model is None

    def test_where_the_trained_model_is_stands_below(self, path: Path):
        (path / "final").mkdir()
        assert f"model      {path / 'final'}" in text(read_status(path, now=NOW))

    def test_what_it_waits_for_is_named_with_its_deadline(self, path: Path):
        generation = {"name": "generation of a batch", "since": NOW - 30, "background": True}
        live(path, WAIT, generation)
        status = read_status(path, now=NOW)
        assert status.waits is not None
        assert (status.waits[0].limit_s, status.waits[0].setting) == (3000.0, "source.wait_s")
        assert status.silent_s <= 20
        since = time.strftime("%H:%M:%S", time.localtime(NOW - 90))
        waits = text(status)
        assert f"waits      {WAIT['name']}: for 1m 30s, since {since}, deadline 50m 00s (source.wait_s)" in waits
        assert "           generation of a batch (in the background): for 30 s" in waits
        assert "no deadline" in waits

    def test_several_engines_are_a_table(self, path: Path):
        serving = EngineRow("http://a:9001", State.SERVING, 12, 3, 240, 71, 65.0, "")
        dead = EngineRow("http://b:9002", State.DEAD, None, 0, 0, 5, 4.0, "it gives no answer")
        live(path, engines=[asdict(serving), asdict(dead)])
        status = read_status(path)
        assert [engine.state for engine in status.engines] == ["serving", "dead"]
        table = text(status)
        first = "http://a:9001  serving  version 12         3 requests of about 240 tokens  71 done  for 1m 05s"
        assert f"engines    {first}" in table
        assert "http://b:9002  dead     no version proved  0 requests of about 0 tokens    5 done   for 4.0 s" in table
        assert "it gives no answer" in table
        assert json.loads(status_json(status))["engines"][0]["in_flight"] == 3

    def test_short_waits_are_not_worth_a_name_and_an_unknown_one_is_not_none(self, path: Path):
        assert "unknown: this process has not written live.json" in text(read_status(path))
        live(path, WAIT, pid=os.getpid() + 1)
        assert read_status(path).waits is None, "it is of the process before"
        live(path)
        assert "none longer than a second" in text(read_status(path))

    def test_the_main_numbers_and_seconds_are_on_a_line_each(self, path: Path):
        metrics(path, 3, step_time=75.0, data_fetch_time=2.0, sync_time=0.01234, eval_time=0.0, loss=None)
        shown = text(read_status(path))
        assert "last step  reward 0.5, loss NaN" in shown
        assert "seconds    whole 1m 15s, waiting for data 2 s, training 1 s, sync 0.0123 s" in shown
        assert "health     warning: entropy is low" in shown

    def test_a_torn_last_line_of_metrics_is_left_out(self, path: Path):
        metrics(path, 3)
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"type": "step", "st')
        assert read_status(path).step == 3


class TestARunThatDoesNotGoOn:
    def test_one_that_failed_says_its_error_and_remedy(self, path: Path):
        change(path, status="failed", error="the disk is full -> free some space", began=50.0, updated=80.0)
        live(path, WAIT, time=60.0)
        status = read_status(path)
        assert (status.state, status.goes_on, status.elapsed_s, status.remaining_s) == ("failed", False, 30.0, None)
        assert "the disk is full -> free some space" in text(status)
        assert "waits" not in text(status)

    @pytest.mark.parametrize("state", ["finished", "stopped"])
    def test_one_that_ended_took_until_its_last_word(self, path: Path, state: str):
        change(path, status=state, began=50.0, updated=80.0)
        status = read_status(path, now=NOW)
        assert (status.state, status.elapsed_s, status.remaining_s) == (state, 30.0, None)
        assert "30 s in all" in text(status)
        assert ("checkpoint none yet" in text(status)) == (state == "stopped")

    def test_one_whose_process_is_gone_left_no_word(self, path: Path, child: subprocess.Popen[bytes]):
        child.kill()
        child.wait()
        change(path, pid=child.pid, began=50.0)
        live(path, WAIT, pid=child.pid)
        status = read_status(path, now=NOW)
        assert (status.state, status.goes_on) == ("gone", False)
        assert f"the process (pid {child.pid}) has ended without saying why: see logs/trainer.log" in text(status)
        assert f"last waits {WAIT['name']}\n" in text(status), "nobody knows until when it waited"

    def test_one_that_nobody_has_collected_yet_is_gone_as_well(self, path: Path, child: subprocess.Popen[bytes]):
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        change(path, pid=child.pid)
        assert read_status(path).state == "gone"

    def test_another_process_with_its_id_is_not_it(self, path: Path):
        change(path, began=psutil.Process().create_time() - 3600)
        assert read_status(path).state == "gone"

    def test_one_that_ends_while_it_is_looked_at_has_said_why(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        def ends(pid: int) -> psutil.Process:
            change(path, status="finished", step=10)
            raise psutil.NoSuchProcess(pid)

        monkeypatch.setattr(psutil, "Process", ends)
        status = read_status(path)
        assert (status.state, status.step, status.note) == ("finished", 10, "")

    @pytest.mark.parametrize("pid", [-1, 2**80])
    def test_an_id_that_no_process_can_have_is_of_none(self, path: Path, pid: int):
        change(path, pid=pid)
        assert read_status(path).state == "gone"

    def test_one_that_a_signal_stopped_is_told_how_to_go_on(self, path: Path, child: subprocess.Popen[bytes]):
        child.send_signal(19)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        change(path, pid=child.pid)
        status = read_status(path)
        assert (status.state, status.goes_on, status.remaining_s) == ("suspended", False, None)
        assert f"kill -CONT {child.pid}" in text(status)


class TestWhatCannotBeSeen:
    def test_a_process_on_another_host_is_not_checked(self, path: Path):
        change(path, pid=2**30, host="elsewhere")
        status = read_status(path)
        assert status.state == "running"
        assert "its process runs on elsewhere, so lachesis cannot check from here" in status.note

    def test_a_run_whose_process_was_not_recorded_is_not_checked_either(self, path: Path):
        (path / "state.json").write_text(json.dumps({"status": "running", "pid": 2**30}))
        status = read_status(path)
        assert (status.state, status.elapsed_s) == ("running", None)
        assert "was not recorded" in status.note


class TestADirectoryThatIsNoRun:
    def test_it_is_an_error_with_a_remedy(self, tmp_path: Path):
        for directory in (tmp_path, tmp_path / "nowhere", Path(__file__)):
            with pytest.raises(ConfigError, match="is not a run directory: it has no state") as caught:
                read_status(directory)
            assert "run.dir" in caught.value.remedy

    @pytest.mark.parametrize("file", ["state.json", "live.json"])
    @pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff\xfe", b'{"status": "running", "pid": "'])
    def test_half_a_file_is_an_error(self, path: Path, file: str, content: bytes):
        (path / file).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"cannot be read from .*{file}") as caught:
            read_status(path)
        assert "logs/trainer.log" in caught.value.remedy

    @pytest.mark.parametrize(
        "wrong",
        [{"status": "dancing"}, {"status": None}, {"pid": "12"}, {"step": True}, {"began": "noon"}, {"host": 1}],
    )
    def test_a_value_of_another_kind_is_an_error(self, path: Path, wrong: dict[str, Any]):
        change(path, **wrong)
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is "):
            read_status(path)

    @pytest.mark.parametrize("waits", [{}, ["a batch"], [WAIT | {"name": 1}], [WAIT | {"background": 1}]])
    def test_waits_of_another_kind_are_an_error(self, path: Path, waits: Any):
        live(path, waits=waits)
        with pytest.raises(ConfigError, match=r"live\.json"):
            read_status(path)

    def test_damaged_metrics_are_an_error_of_data(self, path: Path):
        (path / "metrics.jsonl").write_text("no json\n")
        with pytest.raises(DataError, match="line 1"):
            read_status(path)


class TestLiveFile:
    def test_it_names_waits_while_the_caller_is_blocked(self, path: Path):
        file, long_ago = path / "live.json", time.monotonic() - 100
        begun, end = threading.Event(), threading.Event()

        def produce() -> None:
            with Deadline("generation ahead", None, started=long_ago + 1).waiting():
                begun.set()
                end.wait(LONG_S)

        producer = threading.Thread(target=produce)
        with Deadline("a batch", 300.0, "deadlines.batch_s", long_ago).waiting():
            producer.start()
            assert begun.wait(LONG_S)
            with live_file(file, every_s=0.01):
                until(file.exists)
                status = read_status(path)
                end.set()
                producer.join()
                until(lambda: len(read_status(path).waits or ()) == 1)
                # Written for another reason, the short one is still not in it.
                api = Deadline("the API", None, started=long_ago)
                with short_wait().waiting(), api.waiting():
                    until(lambda: [wait.name for wait in read_status(path).waits or ()] == ["a batch", "the API"])
        assert status.waits is not None
        assert [(wait.name, wait.limit_s, wait.setting, wait.background) for wait in status.waits] == [
            ("a batch", 300.0, "deadlines.batch_s", False),
            ("generation ahead", None, "", True),
        ]
        assert time.time() - status.waits[0].since >= 100
        assert not file.exists()
        assert not list(path.glob(".live*"))

    def test_it_is_not_written_again_while_nothing_changes(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        looks, file = [], path / "live.json"

        def counted() -> tuple[Wait, ...]:
            looks.append(file.stat().st_mtime_ns if file.exists() else 0)
            return waits_now()

        monkeypatch.setattr(rundir, "waits_now", counted)
        with short_wait().waiting(), live_file(file, every_s=0.001):
            until(lambda: len(looks) >= 20)
        assert looks[0] == 0
        assert len(set(looks[1:])) == 1

    def test_what_is_about_to_hold_the_interpreter_is_in_it_before(self, path: Path):
        """The thread that writes the file cannot run during such a call."""
        file = path / "live.json"
        with live_file(file, every_s=LONG_S):
            until(file.exists)
            with Deadline("the reward function r", 5.0, "rewards.timeout_s").waiting():
                waits_writers[-1]()
            now = time.time()
            assert not read_status(path, now=now).waits
            assert [wait.name for wait in read_status(path, now=now + 1.1).waits or ()] == ["the reward function r"]

    def test_a_wait_that_was_over_within_a_second_is_taken_out(self, path: Path):
        with live_file(path / "live.json", every_s=0.01):
            with Deadline("the reward function r", 5.0).waiting():
                waits_writers[-1]()
            until(lambda: read_status(path, now=time.time() + 60).waits == ())

    def test_it_is_a_sign_of_life_even_so(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(rundir, "_SIGN_OF_LIFE_S", 0.0)
        file = path / "live.json"

        def time_in_it() -> float:
            return json.loads(file.read_text())["time"]

        with live_file(file, every_s=0.001):
            until(file.exists)
            first = time_in_it()
            until(lambda: time_in_it() > first)

    def test_what_could_not_be_written_whole_is_not_left_behind(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        tried = threading.Event()

        def full(source: Path, target: Path) -> None:
            tried.set()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(rundir.os, "replace", full)
        with live_file(path / "live.json"):
            assert tried.wait(LONG_S)
        assert not list(path.glob("*live.json*"))

    def test_a_disk_that_takes_nothing_is_reported_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        with caplog.at_level(logging.WARNING, logger="lachesis"), live_file(tmp_path / "gone" / "live.json"):
            until(lambda: bool(caplog.records))
        (record,) = caplog.records
        assert "live.json cannot be written" in record.getMessage()


def short_wait() -> Deadline:
    """One that has not lasted a second, however slow the machine."""
    return Deadline("a moment", None, started=time.monotonic() + 1e6)


class TestTheCommand:
    @pytest.fixture
    def status(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str, str]]:
        def run(*words: str) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["lachesis", "status", *(words or [str(path)])])
            with handlers_kept(), pytest.raises(SystemExit) as exit_:
                cli.main()
            captured = capsys.readouterr()
            return int(exit_.value.code or 0), captured.out, captured.err

        return run

    @pytest.mark.parametrize(
        ("state", "code"), [("starting", 0), ("running", 0), ("finished", 0), ("stopped", 1), ("failed", 1)]
    )
    def test_the_code_says_whether_it_goes_on_or_has_finished(self, status, path: Path, state: str, code: int):
        change(path, status=state)
        assert status()[0] == code

    def test_the_lines_have_titles(self, status, path: Path):
        metrics(path, 2)
        _, out, err = status()
        assert out.startswith("state      running, step 2 of 10, weight version 1\n")
        assert f"process    pid {os.getpid()} on {socket.gethostname()}\n" in out
        assert f"logs       {path / 'logs' / 'trainer.log'}\n" in out
        assert not err

    def test_json_has_all_of_it(self, status, path: Path):
        metrics(path, 3, loss=None)
        live(path, WAIT)
        content = json.loads(status(str(path), "--json")[1])
        assert (content["state"], content["step"], content["steps"], content["goes_on"]) == ("running", 3, 10, True)
        assert content["waits"] == [WAIT]
        assert content["values"]["loss"] is None
        assert content["findings"][0]["rule"] == "entropy"
        assert content["run_dir"] == str(path)

    def test_no_run_is_an_error_of_configuration(self, status, tmp_path: Path):
        code, out, err = status(str(tmp_path))
        assert (code, out) == (2, "")
        assert "is not a run directory" in err


def test_json_of_numbers_that_are_not_finite(path: Path):
    metrics(path, 3, loss=None)
    status = read_status(path)
    assert math.isnan(status.values["loss"])
    assert json.loads(status_json(status))["values"]["loss"] is None
