"""The end of a program whose run goes on, where there is no run: what no test of a real one reaches at its leisure."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    stops = "the run stops after this step and saves a checkpoint; a second Ctrl-C or SIGTERM ends it at once"
    assert said[:2] == ["stopped", stops]


def test_a_second_ctrl_c_ends_the_program_as_ctrl_c_does():
    ended = end(PROGRAM.format(said=CTRL_C, stopped=CTRL_C))
    assert ended.returncode == -signal.SIGINT
    assert "Traceback" not in ended.stderr


# Standard error that Ctrl-C meets while it writes the first line.
INTERRUPTED = """
import io
class Interrupted(io.RawIOBase):
    lines = 0
    def writable(self):
        return True
    def fileno(self):
        return 2
    def write(self, text):
        self.lines += 1
        if self.lines == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return os.write(2, text)
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True)
"""


def test_ctrl_c_while_a_line_is_written_stops_the_run():
    ended = end(PROGRAM.format(said="", stopped="self.done = True") + INTERRUPTED)
    assert ended.returncode == 0, ended.stderr
    assert "the program waits for its run" in ended.stderr and "saves a checkpoint; a second" in ended.stderr


def test_an_error_at_a_prompt_stops_no_run():
    ended = end(PROGRAM.format(said="self.done = True", stopped=""), "-i", then="1 / 0\n")
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert "the program waits for its run" in ended.stderr and "stopped" not in ended.stderr


# A script whose run cannot end: its reward waits, and holds no lock.
SCRIPT = """
import asyncio, os, signal, sys, threading, time, types
import lachesis
from lachesis.run import library

def start_run(loaded, context, **others):
    def press():
        for number in {numbers}:
            time.sleep(0.4)
            os.kill(os.getpid(), number)
    threading.Thread(target=press, daemon=True).start()
    time.sleep(60)

sys.modules["lachesis.run.start"] = types.SimpleNamespace(start_run=start_run)
library.check = lambda *arguments, **keys: None
run = {{"steps": 5, "dir": {place!r}, "name": "r"}}
start = lambda: lachesis.train(model="model", data=[{{"prompt": "a"}}], rewards=[len], run=run, overwrite=True)

async def awaited():
    await start()

def waited():
    start().wait()

def caught():
    try:
        waited()
    except BaseException:
        time.sleep(60)

def busy():
    start()
    time.sleep(60)

def in_a_thread():
    thread = threading.Thread(target=waited)
    thread.start()
    thread.join()

{end}
"""


@pytest.mark.parametrize(
    ("code", "numbers"),
    [
        ("waited()", (2, 2)),
        ("waited()", (15, 2)),
        ("caught()", (2, 15)),
        ("start()", (15, 2)),
        ("busy()", (2, 2)),
        ("asyncio.run(awaited())", (2, 2)),
        ("in_a_thread()", (2, 2)),
    ],
)
def test_a_second_signal_ends_a_script_whose_reward_waits(tmp_path: Path, code: str, numbers: tuple[int, int]):
    begun = time.monotonic()
    ended = end(SCRIPT.format(numbers=numbers, place=str(tmp_path), end=code))
    assert ended.returncode == -numbers[1], ended.stderr
    assert "it at once" in ended.stderr and "memory" not in ended.stderr
    assert time.monotonic() - begun < 30


def test_at_a_prompt_a_second_ctrl_c_ends_only_the_wait(tmp_path: Path):
    script = SCRIPT.format(numbers=(2, 2), place=str(tmp_path), end="")
    ended = end(script, "-i", then="waited()\nprint('still here')\nos._exit(5)\n")
    assert (ended.returncode, "still here" in ended.stdout) == (5, True), ended.stderr
    assert "press Ctrl-C again to end this wait" in ended.stderr


def test_a_task_that_is_cancelled_leaves_the_run_as_it_is(tmp_path: Path):
    ending = """
async def impatient():
    run = start()
    try:
        await asyncio.wait_for(run, 0.3)
    except TimeoutError:
        print(run.done, run.stops)
        os._exit(0)
asyncio.run(impatient())
"""
    assert end(SCRIPT.format(numbers=(), place=str(tmp_path), end=ending)).stdout == "False False\n"
