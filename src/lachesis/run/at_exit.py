"""The end of a program while its run goes on: the run is waited for, or stopped with a checkpoint."""

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


class Started(Protocol):
    """A run that trains in a thread of this process."""

    @property
    def directory(self) -> Path: ...

    @property
    def done(self) -> bool: ...

    def stop(self) -> None: ...


STOPS = "the run stops after its step, with a checkpoint; Ctrl-C once more waits no longer"
_LOOK_S = 0.2
_started: WeakSet[Started] = WeakSet()


def say(words: str) -> None:
    """On standard error: while a run goes on, what is logged is in its own log and nowhere else."""
    sys.stderr.write(f"lachesis: {words}\n")
    sys.stderr.flush()


def hold_exit(run: Started) -> None:
    """From now on the program's end waits for this run; after an error it stops the run first."""
    _register()
    _started.add(run)


@cache
def _register() -> None:
    """Python waits for threads by itself, but has ended its pools of threads and processes by then, which a run needs.

    Only what is registered here is called before that, the latest first, and what is imported while it waits can no
    longer register: hence the pools' modules come first. ``atexit`` is later than all of it.
    """
    for pools in ("concurrent.futures.thread", "concurrent.futures.process"):
        import_module(pools)
    threading._register_atexit(_finish)  # type: ignore[attr-defined]  # as those modules do
    os.register_at_fork(after_in_child=_started.clear)  # the run's threads are not there


def _finish() -> None:
    for run in [run for run in _started if not run.done]:
        with _interrupts_counted() as interrupts:
            _see_to_its_end(run, interrupts)


def _see_to_its_end(run: Started, interrupts: list[int]) -> None:
    """Return when the run has ended: by itself, or stopped by an error of the program's or by Ctrl-C."""
    error = _ended_by()
    stopped = error is not None
    if stopped:
        name = type(error).__name__
        say(f"{name} has ended the program: its run {run.directory} stops after its step, with a checkpoint")
        run.stop()
    else:
        say(f"the program has ended, and waits for its run {run.directory}; Ctrl-C stops it after its step")

    def goes_on() -> str:
        nonlocal stopped
        if interrupts and not stopped:
            stopped = True
            run.stop()
            say(STOPS)
        return "" if run.done else "it goes on"

    wait = Deadline("a program that has ended, waiting for its run", None)
    wait_until(goes_on, Retry(wait, first_s=_LOOK_S, longest_s=_LOOK_S))


@contextmanager
def _interrupts_counted() -> Iterator[list[int]]:
    """Has an entry once Ctrl-C was pressed; the second ends the process.

    A KeyboardInterrupt could come anywhere in here, and would end the wait with the run half stopped.
    """
    interrupts: list[int] = []

    def count(number: int, frame: object) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            _end_at_once()

    before = signal.signal(signal.SIGINT, count)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)  # None: not of Python


def _ended_by() -> BaseException | None:
    """The error that has ended the program; at a prompt the last one has not."""
    return None if hasattr(sys, "ps1") or sys.flags.interactive else getattr(sys, "last_value", None)


def _end_at_once() -> None:
    """As a program that does not handle Ctrl-C; a run's servers end with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
