"""Release of the resources of vLLM's server that a process forked from it must not keep."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def leave_to_server() -> None:
    """Give up the server's sockets and signal handlers; call it in the forked process, on the thread that forked.

    A connection to a server that is gone must be refused rather than wait at a socket that its engine holds, and a
    signal to the engine must not reach the server's event loop.
    """
    signal.set_wakeup_fd(-1)
    for name in os.listdir(_DESCRIPTORS):
        _close_if_listening(int(name))


def _close_if_listening(descriptor: int) -> None:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as one:
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:  # it is gone: that of the directory itself, which has been read
        return
    if listens:
        os.close(descriptor)
