"""`lachesis status` of a run that hangs, that a signal has stopped, and that is gone."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil

from lachesis.run.status import read_status
from tests import warm
from tests.e2e.atropos_runs import wait_for
from tests.e2e.runs import Main, checkpoints, environment, write_reward, write_run
from tests.ports import free_port
from tests.waiting import LONG_S
from tests.warm import COMMAND


def start_trainer(config: Path, log: Path, *options: str) -> subprocess.Popen:
    """What it says goes to ``log``."""
    with log.open("w") as output:
        command = [sys.executable, "-c", COMMAND, "train", str(config), *options]
        return warm.Popen(command, env=environment(), stdout=output, stderr=output)


def test_a_run_that_hangs_says_in_what_and_one_that_is_gone_in_what_it_was(tmp_path: Path, main: Main):
    reward = write_reward(tmp_path, "if call == 2:\n    time.sleep(1000)\nreturn shares")
    config = write_run(tmp_path, rewards={"functions": [reward], "timeout_s": 1000.0}, deadlines={"batch_s": 900.0})
    run_dir = tmp_path / "runs" / "proof"
    log = tmp_path / "trainer.log"
    trainer = start_trainer(config, log)
    try:

        def waits() -> bool:
            assert trainer.poll() is None, log.read_text()
            return (run_dir / "state.json").exists() and len(read_status(run_dir).waits or ()) == 2

        wait_for(waits, "the wait")
        answer = main("status", run_dir)
        assert answer.code == 0
        assert answer.out.startswith("state      running, step 1 of ")
        assert f"process    pid {trainer.pid} on " in answer.out
        assert "last step  reward 0." in answer.out
        assert "waits      the trainer's wait for a batch of 16 groups: for " in answer.out
        assert ", deadline 15m 00s (deadlines.batch_s)" in answer.out
        assert "           the reward function share_of_a: for " in answer.out
        assert ", deadline 16m 40s (rewards.timeout_s)" in answer.out

        trainer.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(trainer.pid).status() == psutil.STATUS_STOPPED, "the stop")
        answer = main("status", run_dir)
        assert answer.code == 1
        assert f"suspended, step 1 of {read_status(run_dir).steps}" in answer.out
    finally:
        trainer.kill()
        trainer.wait()
    answer = main("status", run_dir)
    assert answer.code == 1
    assert f"the process (pid {trainer.pid}) has ended without saying why: see logs/trainer.log" in answer.out
    assert (
        "last waits the trainer's wait for a batch of 16 groups\n           the reward function share_of_a\n"
        in answer.out
    )


def test_a_run_with_a_page_is_paused_saves_a_checkpoint_meanwhile_and_goes_on(tmp_path: Path):
    checkpoint = {"every_steps": 0}
    config = write_run(tmp_path, run={"steps": 40}, data={"eval_size": 0}, checkpoint=checkpoint)
    run_dir, log = tmp_path / "runs" / "proof", tmp_path / "trainer.log"
    trainer = start_trainer(config, log, "--ui")
    try:
        wait_for(lambda: "live page: " in log.read_text(), "the address")
        found = re.search(r"live page: (\S+/)#token=(\S+) ", log.read_text())
        assert found

        def press(what: str) -> str:
            headers = {"X-Lachesis-Token": found[2]}
            request = urllib.request.Request(found[1] + what, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=LONG_S) as answer:
                return answer.read().decode()

        def state() -> str:
            assert trainer.poll() is None, log.read_text()
            return read_status(run_dir).state if (run_dir / "state.json").exists() else ""

        wait_for(lambda: state() in ("loading", "running"), "the run's start")
        press("pause")
        wait_for(lambda: state() == "paused", "the pause")
        at = read_status(run_dir).step
        press("checkpoint")
        wait_for(lambda: checkpoints(run_dir) == [f"step_{at:06d}"], "a checkpoint")
        status = read_status(run_dir)
        assert (status.state, status.step) == ("paused", at) and at < 40
        assert press("resume") == "requested; it resumes"
        assert trainer.wait(LONG_S) == 0, log.read_text()
    finally:
        trainer.kill()
        trainer.wait()
    assert read_status(run_dir).state == "finished"
    assert f"paused after step {at}, as requested" in (run_dir / "logs" / "trainer.log").read_text()
    assert f"resumed at step {at + 1} after a pause of " in log.read_text()


def test_the_first_signal_ends_the_wait_for_a_server_that_does_not_come(tmp_path: Path):
    engine = {"kind": "http", "urls": [f"http://127.0.0.1:{free_port()}"], "wait_s": 1000}
    config = write_run(
        tmp_path, engine=engine, bridge={"kind": "lora_only"}, adapter={"kind": "lora"}, data={"eval_size": 0}
    )
    log = tmp_path / "trainer.log"
    trainer = start_trainer(config, log)
    try:

        def waits() -> bool:
            assert trainer.poll() is None, log.read_text()
            return "waiting for it for up to 1000 s" in log.read_text()

        wait_for(waits, "the wait")
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(LONG_S) == 128 + signal.SIGTERM
    finally:
        trainer.kill()
        trainer.wait()
    assert "the run was asked to stop while it waited for its engine" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not (tmp_path / "runs" / "proof").exists()
