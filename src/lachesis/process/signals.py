"""Signals between processes: handlers kept from forked ones, and an end for one whose ancestor was killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache

import psutil

# How long a process whose ancestor was killed may take to end.
_GRACE_S = 5.0

# The signal mask of a thread that forks.
_held = threading.local()


@cache
def keep_handlers_from_children() -> None:
    """Make processes forked from now on end by SIGTERM, and take SIGINT as Python does by default.

    They would inherit handlers that ask this process to stop: a user's pool, which ends its workers by SIGTERM, would
    wait for them forever, and asyncio would report their signals to the loop of this process.
    """
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_use_defaults)


def _hold() -> None:
    """Hold SIGTERM back until the child has none of our handlers: Python drops signals that it has not handled.

    SIGINT is not held: its KeyboardInterrupt would be raised when the child unblocks it, and get lost.
    """
    _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.before)


def _use_defaults() -> None:
    signal.set_wakeup_fd(-1)
    for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if callable(signal.getsignal(number)):  # an ignored signal stays ignored
            signal.signal(number, default)
    _release()


def end_with(pid: int) -> None:
    """Have this process end once an ancestor is gone, the process ``pid``: SIGTERM, and SIGKILL later."""
    ancestors = [one for one in psutil.Process().parents() if one.pid == pid]

    def watch() -> None:
        ancestors[0].wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    if ancestors:
        threading.Thread(target=watch, name="lachesis-orphan", daemon=True).start()
