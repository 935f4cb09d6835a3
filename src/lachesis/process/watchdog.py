"""Watchdog process, which ends this one if a call holds the interpreter past its deadline.

While native code holds Python's lock, such as a backtracking regular expression, no thread of this process can give the
call up, and no signal handler runs: Ctrl-C and SIGTERM do nothing. Only another process can see it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

# Seconds of grace after a call's deadline; this process itself gives up a call that only waits at once.
GRACE_S = 10.0
_LONGEST_WORDS = 300
# Seconds within which a process answers the one that watches its signals, unless a call holds its interpreter.
HELD_S = 3.0
_HELD = b"a call holds Python's interpreter, and the signal waits for its end; a second one ends this process\n"
_ENDED = (
    b"error: the server had not ended %g s after a signal, and was killed\n",
    b"error: a call held Python's interpreter for %g s after a second signal, and this process was killed\n",
)


class Watchdog:
    """Watchdog that ends this process if a guarded call exceeds its limit and its end was not reported.

    The watching process is started at the first call, and ends with this one. Thread-safe; calls take turns.

    Args:
        grace_s: seconds beyond the limit of a call.
    """

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_by = 0

    @contextmanager
    def guard(self, limit_s: float, words: str) -> Iterator[None]:
        """End the process by SIGKILL if the block takes ``limit_s`` seconds and the grace.

        Args:
            words: the last line on its standard error in that case.
        """
        if math.isinf(limit_s):
            yield
            return
        with self._turn:
            self._tell(f"{limit_s + self._grace_s} {' '.join(words.split())[:_LONGEST_WORDS]}")
            try:
                yield
            finally:
                self._tell("")

    def close(self) -> None:
        """End the watching process. Idempotent."""
        if self._process is not None and self._process.stdin is not None and self._started_by == os.getpid():
            self._process.stdin.close()
            self._process.wait()
        self._process = None

    def _tell(self, line: str) -> None:
        content = f"{line}\n".encode("utf-8", "replace")
        for _ in range(2):
            if self._process is None or self._started_by != os.getpid():  # a forked process has its own one
                self._process = _watching(subprocess.PIPE)
                self._started_by = os.getpid()
            assert self._process.stdin is not None
            try:
                os.write(self._process.stdin.fileno(), content)
                return
            except BrokenPipeError:  # the watching process has ended
                self.close()


def _watching(stdin: int, *words: object) -> subprocess.Popen[bytes]:
    """Start a watching process; its session is new because Ctrl-C is for the process that it watches."""
    line = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, words)]
    return subprocess.Popen(line, stdin=stdin, stdout=subprocess.DEVNULL, start_new_session=True)


@contextmanager
def ended_after_signals(limit_s: float) -> Iterator[None]:
    """End this process from outside if it still runs ``limit_s`` seconds after a SIGTERM or SIGINT within the block.

    Python passes on a signal's number at once, even while a call holds the interpreter and no handler runs.
    """
    ours, before, process = _have_signals_watched(limit_s, spared=0)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        process.kill()
        process.wait()


def end_held_after_signals() -> None:
    """End this process from outside at a second SIGTERM or SIGINT while a call holds the interpreter.

    While none does, the process handles its signals by itself. Call it in the main thread. It does nothing where an
    event loop of the program gets the signals' numbers.
    """
    if (before := signal.set_wakeup_fd(-1)) != -1:
        signal.set_wakeup_fd(before)
    else:
        signal.set_wakeup_fd(_answered(os.getpid())[0].fileno(), warn_on_full_buffer=False)


@cache
def _answered(pid: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, _, process = _have_signals_watched(HELD_S, spared=1)
    threading.Thread(target=_answer, args=(ours,), name="lachesis-signals", daemon=True).start()
    return ours, process


def _have_signals_watched(limit_s: float, *, spared: int) -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    """Start a process that learns of signals by a socket, and ends this one if more than ``spared`` had no effect."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    with theirs:
        return ours, before, _watching(theirs.fileno(), limit_s, spared)


def _answer(link: socket.socket) -> None:
    """Answer each question of the watching process, which a thread can do only while nothing holds the interpreter."""
    while select.select([link], [], [])[0] and link.recv(64):
        link.send(b"\0")


def watch_signals(pid: int, limit_s: float, spared: int) -> None:
    """Run the watching process: each byte is a received signal, or 0 for an answer."""
    link, signals, asked = socket.socket(fileno=0), 0, math.inf
    while os.getppid() == pid:
        if select.select([link], [], [], 0.5)[0]:
            if not (numbers := link.recv(64)):
                return
            if 0 in numbers:
                signals, asked = 0, math.inf
            if found := sum(number in (signal.SIGTERM, signal.SIGINT) for number in numbers):
                signals, asked = signals + found, min(asked, time.monotonic())
                link.send(b"?")
        if time.monotonic() - asked >= limit_s:
            os.write(2, _ENDED[spared] % limit_s if signals > spared else _HELD)
            if signals > spared:
                os.kill(pid, signal.SIGKILL)
            asked = math.inf


def watch(pid: int) -> None:
    """Run the watching process: each line is a number of seconds with words, or the end of a call."""
    end, words = math.inf, b""
    while True:
        left_s = None if math.isinf(end) else max(end - time.monotonic(), 0.0)
        if select.select([0], [], [], left_s)[0]:
            lines = os.read(0, 1 << 16).splitlines()
            if not lines:
                return
            seconds, _, words = lines[-1].partition(b" ")
            end = time.monotonic() + float(seconds) if seconds else math.inf
        elif _is_stopped(pid):  # by SIGSTOP or a debugger: its time does not count now
            end = time.monotonic() + 1.0
        else:
            os.write(2, b"error: " + words + b"\n")
            os.kill(pid, signal.SIGKILL)
            return


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


if __name__ == "__main__":
    if len(sys.argv) > 2:
        with suppress(ConnectionError):  # the other process has ended
            watch_signals(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    else:
        watch(int(sys.argv[1]))
