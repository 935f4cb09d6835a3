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


SIGNALLED = """
import ctypes, os, signal, subprocess, sys, threading, time
from lachesis.process import watchdog
watchdog.end_held_after_signals()
seen = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: seen.append(number))
def signals(*numbers, pid=os.getpid(), after=0.3):
    words = f"import os, time; time.sleep({after}); [(os.kill({pid}, n), time.sleep(0.3)) for n in {numbers}]"
    return subprocess.Popen([sys.executable, "-c", words])
def hold(seconds):
    thread = threading.Thread(target=ctypes.PyDLL(None).sleep, args=(seconds,))
    thread.start()
    thread.join()
"""


def signalled(body: str) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    program = [sys.executable, "-c", SIGNALLED + textwrap.dedent(body)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - began


@pytest.mark.parametrize("numbers", ["2, 2", "15, 15", "2, 15"])
def test_a_second_signal_ends_a_process_whose_interpreter_is_held(numbers: str):
    done, seconds = signalled(f"signals({numbers}); hold(40)")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert done.stderr == (
        "error: a call held Python's interpreter for 3 s after a second signal, and this process was killed\n"
    )
    assert seconds < 20


def test_a_first_signal_that_has_to_wait_is_said_and_kept():
    done, _ = signalled("signals(15); hold(6); print(seen)")
    assert (done.returncode, done.stdout) == (0, "[15]\n")
    assert done.stderr == (
        "a call holds Python's interpreter, and the signal waits for its end; a second one ends this process\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        "signals(2, 15, 2)\nend = time.monotonic() + 5\n"
        "while time.monotonic() < end: time.sleep(0.05)\nprint(len(seen))",
        # A forked process gets signals of its own, while this one holds its interpreter.
        "child = os.fork()\nif child == 0: signal.set_wakeup_fd(-1); time.sleep(30)\n"
        "signals(15, 15, 9, pid=child); hold(5); print(3)",
    ],
)
def test_a_process_that_handles_its_signals_goes_on(body: str):
    done, _ = signalled(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_an_event_loop_keeps_its_signals():
    done, _ = signalled("""
        import asyncio
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: seen.append("loop"))
            watchdog._answered.cache_clear()
            watchdog.end_held_after_signals()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.2)
        asyncio.run(main())
        print(seen)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['loop']\n", "")


def test_signals_are_watched_again_where_an_event_loop_has_ended():
    done, seconds = signalled("""
        import asyncio
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        asyncio.run(main())
        watchdog.end_held_after_signals()
        signals(15, 15); hold(40)
    """)
    assert done.returncode == -signal.SIGKILL and "after a second signal" in done.stderr
    assert seconds < 20
