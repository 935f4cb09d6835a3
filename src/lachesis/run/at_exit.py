"""Exit of a program during its run: waits for the run, or stops it with a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from lachesis.common.deadline import Deadline, Retry, wait_until
from lachesis.process.watchdog import end_held_after_signals


class Started(Protocol):
    """A run that trains in a thread of this process."""

    @property
    def directory(self) -> Path: ...

    @property
    def done(self) -> bool: ...

    @property
    def stops(self) -> bool: ...

    def stop(self) -> None: ...


_STOPS = "the run stops after this step and saves a checkpoint; "
_LOOK_S = 0.2
_started: WeakSet[Started] = WeakSet()
# Signals since the start of the last run: the first one stops it, the second one ends the program.
_signals: list[int] = []


def say(words: str) -> None:
    """Write to standard error, because log messages go only to the run's log during a run."""
    line = f"lachesis: {words}\n"
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except RuntimeError:  # a signal came while another line was written, and its handler cannot enter the stream
        os.write(sys.stderr.fileno(), line.encode())


def hold_exit(run: Started) -> None:
    """Make the program wait for this run at exit, or stop the run first if the program failed."""
    _register()
    _started.add(run)
    _signals.clear()
    if threading.current_thread() is threading.main_thread():
        end_held_after_signals()
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)


def interrupt(run: Started, *, again: bool) -> None:
    """Stop the run at Ctrl-C in a wait for it; ``again`` ends the program, or at a prompt the wait."""
    if not _at_prompt():
        _heed(signal.SIGINT)
    elif again:
        raise KeyboardInterrupt
    else:
        run.stop()
        say(f"{_STOPS}press Ctrl-C again to end this wait")


@cache
def _register() -> None:
    """Register the wait so that it comes before Python ends its pools of threads and processes, which a run needs.

    Functions registered here are called in reverse order, and modules imported while one of them waits can no longer
    register theirs; so the pools' modules are imported first. ``atexit`` functions are called later than all of these.
    """
    for pools in ("concurrent.futures.thread", "concurrent.futures.process"):
        import_module(pools)
    threading._register_atexit(_finish)  # type: ignore[attr-defined]  # as those modules do
    os.register_at_fork(after_in_child=_forget)  # the run's threads do not exist in the child


def _forget() -> None:
    """Forget the run in a forked child, so that SIGTERM ends the child as usual."""
    _started.clear()
    _signals.clear()
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _under_way() -> list[Started]:
    return [run for run in _started if not run.done]


def _terminate(number: int, frame: object) -> None:
    """Stop active runs on SIGTERM, and end the program once their checkpoints are saved.

    SystemExit ends the program's own code wherever it is; :func:`_finish` then waits for the runs.
    """
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once, and so does Ctrl-C
    if not _under_way():
        os.kill(os.getpid(), number)
    _heed(number)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _finish() -> None:
    """Wait until the runs have ended, by themselves or because of an error in the program or a signal."""
    before = len(_signals)
    error = None if _at_prompt() else getattr(sys, "last_value", None)  # a prompt survives errors
    numbers = [signal.SIGINT, *([signal.SIGTERM] if signal.getsignal(signal.SIGTERM) is _terminate else [])]
    for run in _under_way():
        for number in numbers:  # a KeyboardInterrupt instead could end the wait anywhere, with the run half stopped
            signal.signal(number, lambda number, frame: _heed(number))
        if isinstance(error, KeyboardInterrupt) and not _signals:
            _heed(signal.SIGINT)
        elif error is not None and not run.stops:
            say(f"{type(error).__name__} ended the program: {_STOPS}its directory is {run.directory}")
            run.stop()
        elif not run.stops:  # else the code that asked for the stop has reported it
            say(f"the program waits for its run {run.directory} to end; press Ctrl-C to stop the run after this step")
        wait = Deadline("a program that has ended, waiting for its run", None)
        wait_until(lambda run=run: "" if run.done else "it continues", Retry(wait, first_s=_LOOK_S, longest_s=_LOOK_S))
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if signal.SIGTERM in _signals[before:]:
            sys.stdout.flush()
            _end_at_once(signal.SIGTERM)


def _heed(number: int) -> None:
    """Stop the runs at the first signal, and end the program at the second one."""
    _signals.append(number)
    if len(_signals) > 1:
        _end_at_once(number)
    for run in _under_way():
        run.stop()
    say(f"{_STOPS}a second Ctrl-C or SIGTERM ends it at once")


def _at_prompt() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _end_at_once(number: int) -> None:
    """End this process by the default action of the signal; the run's servers end with it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
