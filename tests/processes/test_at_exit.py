"""The end of a program whose run goes on, where there is no run: what no test of a real one reaches at its leisure."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.e2e.runs import environment
from tests.waiting import LONG_S

PROGRAM = """
import os, signal, sys
from pathlib import Path
from lachesis.run.at_exit import hold_exit, say

class Going:
    done = stops = False

    @property
    def directory(self):  # read for the first word that is said of it
        {said}
        return Path("runs/going")

    def stop(self):
        say("stopped")
        {stopped}

run = Going()
hold_exit(run)
"""
CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"


def end(program: str, *options: str, then: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *options, "-c", program]
    return subprocess.run(
        words, input=then, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False
    )


def test_ctrl_c_before_the_wait_has_begun_stops_the_run():
    ended = end(PROGRAM.format(said=CTRL_C, stopped="self.done = True"))
    assert ended.returncode == 0
    said = [line.removeprefix("lachesis: ") for line in ended.stderr.splitlines()]
    assert said[0].startswith("the program waits for its run runs/going to end")
    stops = "the run stops after this step and saves a checkpoint; press Ctrl-C again to end it at once"
    assert said[1:] == ["stopped", stops]


def test_a_second_ctrl_c_ends_the_program_as_ctrl_c_does():
    ended = end(PROGRAM.format(said=CTRL_C, stopped=CTRL_C))
    assert ended.returncode == -signal.SIGINT
    assert "waits for its run runs/going" in ended.stderr and "Traceback" not in ended.stderr


def test_an_error_at_a_prompt_stops_no_run():
    ended = end(PROGRAM.format(said="self.done = True", stopped=""), "-i", then="1 / 0\n")
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert "the program waits for its run" in ended.stderr and "stopped" not in ended.stderr
