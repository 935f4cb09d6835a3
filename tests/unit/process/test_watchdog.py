"""A call that holds the interpreter ends its process, with words; one that does not is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from lachesis.process.watchdog import Watchdog

PROGRAM = """
import os, re, signal, time
from lachesis.process.watchdog import Watchdog
dog = Watchdog(grace_s=0.3)
"""
STOPPED = """
with dog.guard(0.1, 'x'):
    if os.fork() == 0:
        time.sleep(0.9)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1.2)
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM + textwrap.dedent(body)], capture_output=True, text=True)


def test_a_call_that_holds_the_interpreter_is_ended_with_words():
    done = run("""
        with dog.guard(0.1, "reward function 'r' holds\\n the interpreter"):
            re.match("(a+)+$", "a" * 60 + "b")
    """)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == "error: reward function 'r' holds the interpreter\n"


@pytest.mark.parametrize(
    "body",
    [
        "with dog.guard(0.1, 'x'): pass\ntime.sleep(0.8)",
        "for _ in range(50):\n    with dog.guard(0.2, 'x'): time.sleep(0.02)",
        "with dog.guard(float('inf'), 'x'): time.sleep(0.8)",
        STOPPED,
    ],
)
def test_others_go_on(body: str):
    done = run(f"{body}\ndog.close()\nprint('end')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_it_ends_with_the_process_and_is_started_again_where_somebody_has_ended_it():
    dog = Watchdog()
    with dog.guard(5.0, "x"):
        assert dog._process is not None
        first = dog._process.pid
    os.kill(first, signal.SIGKILL)
    time.sleep(0.05)
    with dog.guard(5.0, "x"):
        assert dog._process.pid != first
    dog.close()
    dog.close()
