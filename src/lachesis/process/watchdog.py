"""Watchdog process, which ends this one if a call holds the interpreter past its deadline.

While native code holds Python's lock, such as a backtracking regular expression, no thread of this process can give the
call up, and no signal handler runs: Ctrl-C and SIGTERM do nothing. Only another process can see it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds of grace after a call's deadline; this process itself gives up a call that only waits at once.
GRACE_S = 10.0
_LONGEST_WORDS = 300


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
                self._process = self._start()
                self._started_by = os.getpid()
            assert self._process.stdin is not None
            try:
                os.write(self._process.stdin.fileno(), content)
                return
            except BrokenPipeError:  # the watching process has ended
                self.close()

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the process that it watches
        )


@contextmanager
def ended_after_signals(limit_s: float) -> Iterator[None]:
    """End this process from outside if it still runs ``limit_s`` seconds after a SIGTERM or SIGINT within the block.

    Python passes on a signal's number at once, even while a call holds the interpreter and no handler runs.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    line = [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), str(limit_s)]
    process = subprocess.Popen(line, stdin=source, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(source)
    before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(sink)
        process.kill()
        process.wait()


def watch_signals(pid: int, limit_s: float) -> None:
    """Run the watching process: each byte is a received signal; their end is the end of the other process."""
    while (numbers := os.read(0, 1 << 10)) and not {signal.SIGTERM, signal.SIGINT} & set(numbers):
        pass
    end = time.monotonic() + limit_s
    while numbers and select.select([0], [], [], max(0.0, end - time.monotonic()))[0]:
        numbers = os.read(0, 1 << 10)
    if numbers and os.getppid() == pid:
        os.write(2, b"error: the server had not ended %g s after a signal, and was killed\n" % limit_s)
        os.kill(pid, signal.SIGKILL)


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
        watch_signals(int(sys.argv[1]), float(sys.argv[2]))
    else:
        watch(int(sys.argv[1]))
