"""What a process does on a signal is not done by those that it forks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lachesis.process.signals import keep_handlers_from_children

# A process that starts another one by multiprocessing and waits for it, as vLLM's server does for its engine.
_PARENT = """
import multiprocessing, os, signal, time
from lachesis.process import signals
signals._GRACE_S = 0.2

def engine(heeds, server):
    signal.signal(signal.SIGTERM, signal.SIG_DFL if heeds else signal.SIG_IGN)
    signals.end_with(server)
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context({method!r}).Process(target=engine, args=({heeds}, os.getpid())).start()
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    keep_handlers_from_children()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ending_of_child(
    number: signal.Signals, do: Callable[[], object] = lambda: time.sleep(30), *, begun: bool = False
) -> int:
    """The exit code of a forked process that sleeps, and is sent a signal: at once, or once it has ``begun``."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        code = 9
        try:
            os.write(writes, b"x")
            do()
        except KeyboardInterrupt:
            code = 7
        finally:
            os._exit(code)
    os.close(writes)
    if begun:
        os.read(reads, 1)
    os.close(reads)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_ends_by_sigterm_and_sees_ctrl_c():
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    assert ending_of_child(signal.SIGTERM) == -signal.SIGTERM
    assert ending_of_child(signal.SIGINT, begun=True) == 7
    assert received == []


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert ending_of_child(signal.SIGTERM, lambda: time.sleep(0.2)) == 9


def test_a_loop_does_not_hear_of_signals_to_forked_processes():
    async def run() -> list[int]:
        heard: list[int] = []
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, heard.append, 1)
        try:
            assert ending_of_child(signal.SIGTERM) == -signal.SIGTERM
            await asyncio.sleep(0.05)
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
        return heard

    assert asyncio.run(run()) == []


@pytest.mark.parametrize(("method", "heeds"), [("fork", True), ("fork", False), ("spawn", True)])
def test_a_process_ends_soon_after_the_one_that_started_it_was_killed(tmp_path: Path, method: str, heeds: bool):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT.format(method=method, heeds=heeds))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=20)
    assert gone == [child]
