"""A process with a thread that dies for want of memory ends with one line, whatever waits for that thread."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import time

import pytest

from lachesis.common.errors import TrainingError
from lachesis.process.lost_threads import MEMORY_FULL, lacks_memory

_BEGINNING = """
import threading, time
from lachesis.process.lost_threads import threads_watched

class Unseen(threading.Thread):  # no memory for any word of Python's
    def _bootstrap(self):
        raise SystemExit

class DiesAtOnce(threading.Thread):
    def _bootstrap(self):
        raise MemoryError

def dies():
    raise MemoryError

with threads_watched(every_s=0.1):
    {what}
"""


def _run(what: str) -> subprocess.CompletedProcess[str]:
    program = _BEGINNING.format(what=what)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("DiesAtOnce().start()", id="a thread that never begins, for which Thread.start waits"),
        pytest.param("Unseen().start()", id="the same, and nothing is said of it"),
        pytest.param("threading.Thread(target=dies).start(); time.sleep(50)", id="a thread that dies at work"),
        pytest.param(
            "from concurrent.futures import ThreadPoolExecutor as Pool\n"
            "    threading.Thread = DiesAtOnce; Pool().submit(print)",
            id="a thread of a pool",
        ),
    ],
)
def test_a_thread_that_dies_for_want_of_memory_ends_the_process_with_one_line(what: str) -> None:
    began = time.monotonic()
    ended = _run(what)
    assert ended.returncode == TrainingError.exit_code, ended.stderr
    assert ended.stderr.endswith(f"error: {MEMORY_FULL}\n")
    assert ended.stderr.count("error: ") == 1
    assert time.monotonic() - began < 20


def test_threads_that_begin_late_or_end_or_fail_of_something_else_do_not_end_it() -> None:
    ended = _run(
        "threads = [threading.Thread(target=time.sleep, args=(0.02 * i,)) for i in range(50)]\n"
        "    for one in threads: one.start()\n"
        "    never = threading.Thread(target=dies)\n"  # that is not started is not waited for
        "    wrong = threading.Thread(target=lambda: 1 / 0); wrong.start()\n"
        "    time.sleep(1.2); print('well')"
    )
    assert (ended.returncode, ended.stdout) == (0, "well\n")
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("can't start new thread"), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
            True,
        ),
        (OSError("libgomp.so.1: failed to map segment from shared object"), True),
        (RuntimeError("another one"), False),
        (ValueError("can't start new thread"), False),
    ],
)
def test_errors_that_mean_that_memory_is_used_up(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


# At the last two numpy's OpenBLAS would ask for a buffer for ever.
@pytest.mark.parametrize("megabytes", [24, 40, 72, 150, 200])
def test_a_command_without_memory_for_its_imports_ends_with_one_line(megabytes: int) -> None:
    """From what Python itself needs to a library's shared objects; which of them fails depends on the machine."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    command = [sys.executable, "-m", "lachesis", "env", "arithmetic", "serve", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert ended.returncode in (1, TrainingError.exit_code), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert "memory" in ended.stderr


def numpys(cause: ImportError) -> ImportError:
    error = ImportError("you should not try to import numpy from its source directory")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "words", ["x.so: failed to map segment from shared object", "cannot allocate memory in static TLS"]
)
def test_a_shared_object_that_finds_no_memory_is_told_from_one_that_is_missing(words: str) -> None:
    assert lacks_memory(ImportError(words))
    assert lacks_memory(numpys(ImportError(words)))
    assert not lacks_memory(numpys(ImportError("no module named x")))
    assert not lacks_memory(ImportError("no module named x"))


def test_a_thread_whose_join_is_interrupted_goes_on() -> None:
    ended = _run("""
    import os, signal
    slow = threading.Thread(target=time.sleep, args=(1.0,))
    slow.start()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        slow.join()
    except KeyboardInterrupt:
        time.sleep(1.0)
    """)
    assert (ended.returncode, ended.stderr) == (0, "")
