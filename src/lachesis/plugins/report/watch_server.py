"""Server of ``lachesis watch`` and its live page: a separate command, or a process beside a run."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lachesis.common import http
from lachesis.common.errors import ConfigError
from lachesis.process.workers import ChildProcess, ProcessLimits

DEFAULT_PORT = 8010
# Seconds to pass a new process its arguments.
_HAND_OVER_S = 30.0


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Listening port of this machine, and the token of the page there."""

    listener: socket.socket
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))

    @property
    def words(self) -> str:
        """Address for users who may stop the runs, and one for others."""
        address = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        return f"{address}#token={self.token} (with this token you can stop the runs; {address} only shows them)"


def listen(port: int) -> PageAddress:
    """Listen on the port. Raises ConfigError if it is taken."""
    return PageAddress(http.listen("127.0.0.1", port))


def serve(run_dirs: Sequence[Path], listener: socket.socket, token: str) -> None:
    """Serve the page of these runs until the process ends."""
    from lachesis.plugins.report.watch import Watch

    http.http_server(Watch(run_dirs, token=token).app()).run(sockets=[listener])


@contextmanager
def beside(run_dir: Path) -> Iterator[str]:
    """Serve the page of a run, which may not exist yet, from a separate process, which does not slow training.

    It is at the usual port, or at a free one if that is taken. Yields its address in words.
    """
    try:
        place = listen(DEFAULT_PORT)
    except ConfigError:
        place = listen(0)
    child = ChildProcess(_serve_given, run_dir, place.token, timeout_s=_HAND_OVER_S, limits=ProcessLimits())
    with place.listener, child:
        socket.send_fds(child.link, [b"."], [place.listener.fileno()])
        yield place.words


def _serve_given(link: socket.socket, run_dir: Path, token: str) -> None:
    """Serve in the process beside the run, on its parent's listening socket."""
    _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    with socket.socket(fileno=descriptors[0]) as listener:
        serve([run_dir], listener, token)
