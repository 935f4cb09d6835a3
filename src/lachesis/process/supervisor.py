"""Supervisor that runs one command in a separate process group, and never leaves it behind.

:mod:`lachesis.process.managed` runs this file with a bare Python, so it imports nothing of ours. The arguments are a
file descriptor (one end of a socket pair), the pid of the process that asked, the seconds that the command gets to end,
and the command. It sends ``started PID``, then ``exited CODE`` with the code of Popen, or ``failed REASON``. It
receives only the end of the stream, which means that the command should stop, or that the process that asked has died.

Why a process in between, and not prctl(PR_SET_PDEATHSIG): that signal is sent when the *thread* that started
the child ends, it reaches the child but not the child's own processes (an engine has workers, which hold the GPU), it
cannot be followed by a stronger one, and only Linux has it. A closed socket is seen everywhere, however the other side
died, and from here the whole group can be ended and waited for. If this process itself is killed, that signal remains:
the command ends with it, and the process that asked ends the rest of the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Protocol

# Other children that the process that asked has forked may hold its end of the socket open after its death, so its pid
# is checked too.
_LOOK_S = 1.0
# Seconds for a killed process to disappear, which includes freeing GPU memory.
_REAP_S = 20.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded before a child is forked.
_LIBC = ctypes.CDLL(None)


class Child(Protocol):
    """Methods of Popen that the command's process needs."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def supervise(
    link: socket.socket, *, is_asked_for: Callable[[], bool], grace_s: float, start: Callable[[], Child]
) -> None:
    """Start the command; when it ends, or has to stop, end the rest of its group.

    Args:
        link: our end of the socket pair.
        is_asked_for: returns True if the process that asked is still alive.
        grace_s: seconds that the command may take to end before it is killed.
        start: starts the command as the head of a group, and may raise OSError.
    """
    wake, awake = socket.socketpair()
    with link, wake, awake:
        for end in (wake, awake):
            end.setblocking(False)
        # Signals to this process (a terminal's, a session's end) are not for it: it ends after its command.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
        _adopt_orphans()
        try:
            child = start()
        except OSError as error:
            _tell(link, f"failed {error}")
            return
        _tell(link, f"started {child.pid}")
        while child.poll() is None:
            ready, _, _ = select.select([link, wake], [], [], _LOOK_S)
            if wake in ready:
                wake.recv(4096)
            if link in ready or not is_asked_for():
                _end(child, grace_s)
                break
        # The leader's pid stays the group's while a process is left in it, and is not reused at once.
        _signal_group(child.pid, signal.SIGKILL)
        code = child.wait()
        _reap_group(child.pid)
        _tell(link, f"exited {code}")


def _end(child: Child, grace_s: float) -> None:
    """Ask the group to end, and return when its leader has, or after ``grace_s``."""
    _signal_group(child.pid, signal.SIGTERM)
    until = time.monotonic() + grace_s
    while time.monotonic() < until and child.poll() is None:
        time.sleep(0.02)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses if only the dead leader is left
        os.killpg(pid, number)


def _adopt_orphans() -> None:
    """Become the parent of processes that the command leaves behind, to await their end (Linux only)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap_group(pid: int) -> None:
    until = time.monotonic() + _REAP_S
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < until:
            if os.waitpid(-pid, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


def prepare_child() -> None:
    """Prepare the child before the command (Linux only).

    Signals are reset, and SIGKILL follows if this process dies.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _tell(link: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # the reader has gone
        link.sendall(f"{line}\n".encode())


def main() -> None:
    """Run this file's command."""
    number, parent, grace_s, *command = sys.argv[1:]
    supervise(
        socket.socket(fileno=int(number)),
        is_asked_for=lambda: os.getppid() == int(parent),
        grace_s=float(grace_s),
        start=lambda: subprocess.Popen(command, start_new_session=True, preexec_fn=prepare_child),
    )


if __name__ == "__main__":
    main()
