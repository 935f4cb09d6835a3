"""Bounded shutdown of a server: within seconds of the first signal, and with its engine's last error."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from lachesis.common.errors import escape_controls
from lachesis.process.managed import names_an_error

# Seconds from the first signal until the server and its children are killed; they usually end within two.
LIMIT_S = 8.0
_PART = 1 << 16
_LONGEST_LINE = 16 << 10
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:ERROR|CRITICAL)\s[\d-]+ [\d:]+ \[[^\]]*\]\s*")
# Lines in which vLLM reports a dead engine; the error itself is above, or in the line.
_DEATH = re.compile(r"EngineDeadError|EngineCore (?:encountered|failed)|Engine core proc\S* .*died|fatal error")
# Lines that only repeat that it has died.
_REPEATS = re.compile(r"EngineDeadError|See (?:root cause|stack trace)|Engine core initialization failed")


class LastWords:
    """Last error that a server has printed, and the state of its engine."""

    def __init__(self) -> None:
        self.error = ""
        self.engine_died = False

    def hear(self, line: str) -> None:
        """Take note of a line of the log."""
        line = _COLOUR.sub("", line).strip()
        if _DEATH.search(line):
            self.engine_died = True
        if names_an_error(line) and not _REPEATS.search(line):
            self.error = _PREFIX.sub("", line)

    @property
    def sentence(self) -> str:
        """Last error of the engine; empty unless the engine died of it."""
        return self.error if self.engine_died else ""


@contextmanager
def heard_output(words: LastWords) -> Iterator[int]:
    """Read in a thread what this process and its children print, and pass it on to its destination.

    Yields:
        The descriptor of the standard error as it was.
    """
    kept = [os.dup(number) for number in (1, 2)]
    threads: list[threading.Thread] = []
    for number, target in zip((1, 2), kept, strict=True):
        source, sink = os.pipe()
        os.dup2(sink, number)
        os.close(sink)
        thread = threading.Thread(target=_pass_on, args=(source, target, words), name="lachesis-output", daemon=True)
        thread.start()
        threads.append(thread)
    try:
        yield kept[1]
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, OSError):
                stream.flush()
        for number, target in zip((1, 2), kept, strict=True):
            os.dup2(target, number)
        for thread in threads:  # surviving children keep the pipes open
            thread.join(0.5)


def _pass_on(source: int, target: int, words: LastWords) -> None:
    rest = b""
    while part := os.read(source, _PART):
        with suppress(OSError):  # the reader is gone: the server continues
            view = memoryview(part)
            while view:
                view = view[os.write(target, view) :]
        *lines, rest = (rest + part).split(b"\n")
        rest = rest[-_LONGEST_LINE:]
        for line in lines:
            words.hear(line[-_LONGEST_LINE:].decode(errors="replace"))
    os.close(source)


@contextmanager
def bounded_end(words: LastWords, *, limit_s: float = LIMIT_S, error_output: int = 2) -> Iterator[list[int]]:
    """Limit the time from the first SIGTERM or SIGINT until this process and its children are killed.

    The signal goes to the server's handlers for it, installed now or later. It does not matter what they wait for, or
    if they return. The limit holds beyond the block if a thread started in it is still running, because Python waits
    for such threads.

    Yields:
        The signals that have come.
    """
    received: list[int] = []
    timers: list[threading.Timer] = []
    earlier = {child.pid for child in _children()}
    earlier_threads = set(threading.enumerate())
    install = signal.signal
    own: dict[Any, Any] = {}

    def begin(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            timer = threading.Timer(limit_s, _end_all, (number, words, error_output, limit_s))
            timer.daemon = True
            timer.start()
            timers.append(timer)

    def watched(handler: Any) -> Any:
        def handle(number: int, frame: Any) -> None:
            begin(number)
            if callable(handler):
                handler(number, frame)
            elif handler == signal.SIG_DFL:
                _kill(child.pid for child in _children() if child.pid not in earlier)
                install(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        return handle

    def replaced(number: Any, handler: Any) -> Any:
        if number not in (signal.SIGTERM, signal.SIGINT) or handler == signal.SIG_IGN or os.getpid() != server:
            return install(number, handler)
        before = own.get(number, signal.getsignal(number))
        install(number, watched(handler))
        own[number] = handler
        return before

    server = os.getpid()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        replaced(number, handler)
    signal.signal = replaced
    try:
        yield received
    finally:
        signal.signal = install
        for number, handler in before.items():
            install(number, handler)
        if all(one.daemon or one in earlier_threads for one in threading.enumerate()):  # Python waits for others
            for timer in timers:
                timer.cancel()
        if received:  # this process waits for its children when it ends, but must not wait for a stuck one
            _kill(child.pid for child in _children() if child.pid not in earlier)


def _end_all(number: int, words: LastWords, error_output: int, limit_s: float) -> None:
    """End this process and its children as the signal would have, whatever they wait for."""
    name, reason = signal.Signals(number).name, f": {escape_controls(words.sentence)}" if words.sentence else ""
    line = f"error: the server had not ended {limit_s:g} s after {name}, and was killed{reason}\n"
    with suppress(OSError):
        os.write(error_output, line.encode(errors="replace"))
    children = [child.pid for child in _children()]
    sys.setswitchinterval(60)  # otherwise a thread that waits for a child would run between the child's end and ours
    _kill(children)
    os._exit(128 + number)


def _children() -> list[psutil.Process]:
    """Return all processes that this one has started, and their descendants."""
    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
