"""What a process that is forked from vLLM's server has of it and must not keep."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def leave_to_server() -> None:
    """Give up what is the server's. To be called in the forked process, by the thread that forked.

    Who connects to a server that is gone has to be refused, and not to wait at a socket that its engine holds; and a
    signal to the engine is none to the server, whose event loop would hear of it.
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
