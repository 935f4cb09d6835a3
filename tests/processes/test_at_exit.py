"""The end of a program whose run goes on, where there is no run: what no test of a real one reaches at its leisure."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.e2e.runs import environment
from tests.waiting import LONG_S

PROGRAM = """
from pathlib import Path
from lachesis.run.at_exit import hold_exit, say

class Going:
    directory, done = Path("runs/going"), False

    def stop(self):
        say("stopped")

    def join(self):
        {join}

run = Going()
hold_exit(run)
"""


def end(program: str, *options: str, then: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *options, "-c", program]
    return subprocess.run(
        words, input=then, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False
    )


def test_a_second_ctrl_c_ends_the_program_as_ctrl_c_does():
    ended = end(PROGRAM.format(join="raise KeyboardInterrupt"))
    assert ended.returncode == -signal.SIGINT
    assert "waits for its run runs/going" in ended.stderr and "Traceback" not in ended.stderr


def test_an_error_at_a_prompt_stops_no_run():
    ended = end(PROGRAM.format(join="self.done = True"), "-i", then="1 / 0\n")
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert "the program has ended, and waits for its run" in ended.stderr and "stopped" not in ended.stderr
