"""Fork server for commands that share slow imports, which may take ten seconds: one process imports and forks them.

The other side is :mod:`lachesis.process.fork_main`. Python's own forkserver is one to a process, so that its imports
are settled by who uses it first, and each process that comes of it imports the program that asked once more.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from lachesis.common.files import open_log

# Ahead of each request, which may be longer than one message of a socket.
SIZE_BYTES = 8


class ForkServer:
    """Server process that imports what ``python -m MODULE`` commands need, and forks those that are requested.

    It ends with this process at the latest. Linux only.

    Args:
        imports: a module with a function ``load(arguments)``, which imports, and one ``is_usable()``, which tells
            after that whether forked processes can go on with it; where not, commands are executed anew.
        arguments: for ``load``.
        log_path: what is said during the imports is appended here.
        env: its environment, and what the imports read of theirs.
    """

    def __init__(self, imports: str, arguments: Sequence[str], *, log_path: Path, env: Mapping[str, str]) -> None:
        self.log_path = log_path
        self._link, theirs = socket.socketpair()
        with theirs, open_log(log_path) as log:
            self.log_start = log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lachesis.process.fork_main", str(theirs.fileno()), imports, *arguments],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # So that none is left that nobody has waited for.
        threading.Thread(target=self._process.wait, name="lachesis-forkserver", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_open(self) -> bool:
        """Return True if the server may be asked."""
        return self._link.fileno() >= 0

    def fork(
        self, command: Sequence[str], *, link: socket.socket, log: IO[bytes], env: Mapping[str, str], grace_s: float
    ) -> None:
        """Ask for a supervisor (:mod:`lachesis.process.supervisor`) of ``python -m ...``, and wait for nothing.

        Its end of ``link`` closes without a word where none comes of it.

        Args:
            link: on it comes the supervisor's pidfd with one byte, then what a supervisor says.
            log: takes the output of both.
            env: the command's environment.
            grace_s: as of :func:`~lachesis.process.supervisor.supervise`.
        """
        what = {"command": [*command], "env": dict(env), "cwd": os.getcwd(), "asker": os.getpid(), "grace_s": grace_s}
        request = json.dumps(what).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and the link tells
            socket.send_fds(self._link, [len(request).to_bytes(SIZE_BYTES, "big")], [link.fileno(), log.fileno()])
            self._link.sendall(request)

    def close(self) -> None:
        """Request nothing more: the server ends once it has forked what was requested. Idempotent. Idempotent."""
        self._link.close()

    def kill(self) -> None:
        """Kill the server, its imports done or not; forked processes go on."""
        self.close()
        self._process.kill()


class ForkedSupervisor:
    """Supervisor forked by a fork server: not a child of this process, so known by its pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended; to be called once at the end."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll()
        os.close(self._pidfd)


def receive_supervisor(link: socket.socket) -> ForkedSupervisor | None:
    """Wait until it has been forked; return ``None`` if none will be."""
    try:
        _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    except ConnectionResetError:
        return None
    return ForkedSupervisor(descriptors[0]) if descriptors else None
