"""Exit of a program during its run: waits for the run, or stops it with a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


STOPS = "the run stops after this step and saves a checkpoint; press Ctrl-C again to end it at once"
TERMINATED = "SIGTERM: the run stops after this step and saves a checkpoint; a second SIGTERM ends it at once"
_LOOK_S = 0.2
_started: WeakSet[Started] = WeakSet()


def say(words: str) -> None:
    """Write to standard error, because log messages go only to the run's log during a run."""
    sys.stderr.write(f"lachesis: {words}\n")
    sys.stderr.flush()


def hold_exit(run: Started) -> None:
    """Make the program wait for this run at exit, or stop the run first if the program failed."""
    _register()
    _started.add(run)
    if threading.current_thread() is threading.main_thread():
        end_held_after_signals()
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)


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
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: object) -> None:
    """Stop active runs on SIGTERM, and end the program once their checkpoints are saved.

    SystemExit ends the program's own code wherever it is; :func:`_finish` then waits for the runs.
    """
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once
    under_way = [run for run in _started if not run.done]
    if not under_way:
        os.kill(os.getpid(), number)
    for run in under_way:
        run.stop()
    say(TERMINATED)
    raise SystemExit(128 + number)


def _finish() -> None:
    for run in [run for run in _started if not run.done]:
        with _interrupts_counted() as interrupts:
            _see_to_its_end(run, interrupts)
        if signal.SIGTERM in interrupts:
            sys.stdout.flush()
            _end_at_once(signal.SIGTERM)


def _see_to_its_end(run: Started, interrupts: list[int]) -> None:
    """Wait until the run has ended, by itself or because of an error in the program or Ctrl-C."""
    error = _ended_by()
    stopped = run.stops or error is not None
    if run.stops:
        pass  # the code that asked for the stop has reported it
    elif error is not None:
        name = type(error).__name__
        say(f"{name} ended the program: its run {run.directory} stops after this step and saves a checkpoint")
        run.stop()
    else:
        say(f"the program waits for its run {run.directory} to end; press Ctrl-C to stop the run after this step")

    def goes_on() -> str:
        nonlocal stopped
        if interrupts and not stopped:
            stopped = True
            run.stop()
            say(STOPS)
        return "" if run.done else "it continues"

    wait = Deadline("a program that has ended, waiting for its run", None)
    wait_until(goes_on, Retry(wait, first_s=_LOOK_S, longest_s=_LOOK_S))


@contextmanager
def _interrupts_counted() -> Iterator[list[int]]:
    """Yield a list that gets an entry at the first Ctrl-C or SIGTERM; the second one ends the process.

    A KeyboardInterrupt instead could end the wait anywhere, with the run half stopped.
    """
    interrupts: list[int] = []

    def count(number: int, frame: object) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            _end_at_once(number)

    numbers = [signal.SIGINT]
    if signal.getsignal(signal.SIGTERM) is _terminate:
        numbers.append(signal.SIGTERM)
    before = {number: signal.signal(number, count) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the handler was not installed by Python


def _ended_by() -> BaseException | None:
    """Return the error that ended the program; None at an interactive prompt, which survives errors."""
    return None if hasattr(sys, "ps1") or sys.flags.interactive else getattr(sys, "last_value", None)


def _end_at_once(number: int) -> None:
    """End this process by the default action of the signal; the run's servers end with it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
