"""A server ends within a time of the first signal, whatever it waits for, with its engine's last error."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from lachesis.plugins.serving.bounded_end import LastWords
from tests.ports import free_port
from tests.waiting import LONG_S, until

SERVER = """
import signal, subprocess, sys, threading, time
from lachesis.plugins.serving.bounded_end import LastWords, bounded_end, heard_output

words = LastWords()
with heard_output(words) as error_output, bounded_end(words, limit_s=1.0, error_output=error_output) as received:
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    HANDLER
    print("child", child.pid, flush=True)
    WAIT
print("ended", received, words.sentence, flush=True)
"""
# An engine that says why it dies, and does not: nothing ends it but SIGKILL.
STUCK = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("(EngineCore pid=7) ERROR 11-28 07:00:00 [core.py:1] RuntimeError: the card fell off the bus", file=sys.stderr)
print("(APIServer pid=1) EngineDeadError: EngineCore encountered an issue.", file=sys.stderr, flush=True)
time.sleep(1000)
"""
HANDLERS = {
    "never": "signal.signal(signal.SIGTERM, lambda *_: None)",
    "waits": "signal.signal(signal.SIGTERM, lambda *_: child.wait())",
}
WAITS = {
    "a_thread": "done = threading.Event(); signal.signal(signal.SIGTERM, lambda *_: done.set()); "
    "threading.Thread(target=time.sleep, args=(1000,)).start(); done.wait()",
    "a_child": "child.wait()",
    "a_lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a_loop": "import asyncio; asyncio.run(asyncio.sleep(1000))",
}


def server(handler: str, wait: str) -> subprocess.Popen[str]:
    code = SERVER.replace("CHILD", repr(STUCK)).replace("HANDLER", handler).replace("WAIT", wait)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("handler", "wait"), [("never", "a_child"), ("waits", "a_lock"), ("never", "a_loop"), ("never", "a_thread")]
)
def test_it_is_killed_with_its_children_when_its_time_is_over(handler: str, wait: str):
    with server(HANDLERS[handler], WAITS[wait]) as process:
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline().split()[1])
        heard = [process.stderr.readline() for _ in range(2)]
        assert "fell off the bus" in heard[0]
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(LONG_S) == 128 + signal.SIGTERM
        assert time.monotonic() - asked < 10
    last = rest.strip().splitlines()[-1]
    assert last == (
        "error: the server had not ended 1 s after SIGTERM, and was killed: RuntimeError: the card fell off the bus"
    )
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_one_that_still_loads_takes_its_children_along():
    """It has no handler yet, and a child that loads ignores the signal."""
    with server("", "child.wait()") as process:
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline().split()[1])
        for _ in range(2):
            process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == -signal.SIGTERM
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_one_that_ends_by_itself_is_left_to_it():
    wait = "signal.signal(signal.SIGTERM, lambda *_: child.kill()); child.wait()"
    with server("", wait) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        for _ in range(2):
            process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=LONG_S)
    assert process.returncode == 0 and "was killed" not in error
    assert out == f"ended [{signal.SIGTERM:d}] RuntimeError: the card fell off the bus\n"


def test_what_is_stuck_does_not_keep_one_that_ended():
    """It leaves its loop in time, and would wait for the child when it ends."""
    code = SERVER.replace("CHILD", repr(STUCK)).replace(
        "HANDLER", "signal.signal(signal.SIGTERM, lambda *_: done.set())"
    )
    code = "import threading\ndone = threading.Event()\n" + code.replace("WAIT", "done.wait()") + "child.wait()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=LONG_S)
    assert process.returncode == 0 and "was killed" not in error and "ended [15]" in out


def test_only_an_engine_that_died_has_last_words():
    words = LastWords()
    words.hear("ValueError: a request was wrong")
    assert words.sentence == ""
    words.hear("\x1b[1;36m(EngineCore pid=9)\x1b[0;0m ERROR 01-02 03:04:05 [core.py:9] OSError: no space")
    words.hear("(APIServer) ERROR 01-02 03:04:05 [async_llm.py:5] EngineDeadError: EngineCore encountered an issue.")
    assert words.sentence == "OSError: no space"


EMBEDDED = """
import signal, sys, threading, types
app = types.ModuleType("lachesis.plugins.embedded_server.app")

def serve_embedded(options, *, on_ready):
    # As uvicorn: its handler asks it to end, and the end waits for a thread that generates for ever.
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    print("up", flush=True)
    asked.wait()
    threading.Event().wait()

def hold(options, *, on_ready):
    # A thread that computes in C and keeps the lock of the interpreter: no handler runs.
    import ctypes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    threading.Thread(target=ctypes.PyDLL(None).sleep, args=(1000,)).start()
    signal.pause()

app.serve_embedded = hold if "hold" in sys.argv else serve_embedded
sys.modules[app.__name__] = app
from lachesis.engines.options import ServeOptions
from lachesis.plugins.serving.serve import serve
serve(ServeOptions(model="m", port=int(sys.argv[1]), engine="embedded"), on_ready=print)
"""


def test_the_embedded_server_ends_in_ten_seconds_though_its_generation_hangs():
    with subprocess.Popen(
        [sys.executable, "-c", EMBEDDED, str(free_port())],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - asked < 10
    assert error.splitlines()[-1] == "error: the server had not ended 8 s after SIGTERM, and was killed"


def test_the_embedded_server_ends_in_ten_seconds_though_its_generation_holds_the_interpreter():
    with subprocess.Popen(
        [sys.executable, "-c", EMBEDDED, str(free_port()), "hold"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 1
        time.sleep(0.2)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=LONG_S)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - asked < 10
    assert error.splitlines()[-1] == "error: the server had not ended 9 s after a signal, and was killed"
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below))
