"""Ports for servers that start a moment later, or start again."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

# Below those that Linux gives to outgoing connections and to servers that do not care (ip_local_port_range): one of
# these could be taken before the server starts, or while it is down.
_FIRST, _LAST = 20_000, 32_000
_numbers = itertools.count()
# A process keeps what it has drawn, till its end, by a lock on one byte of this file: others draw at the same time.
_drawn = os.open(Path(tempfile.gettempdir(), f"lachesis-tests-{os.getuid()}.ports"), os.O_RDWR | os.O_CREAT, 0o600)


def _begin() -> None:
    """Each test process draws from somewhere else."""
    global _numbers
    _numbers = itertools.count(os.getpid() * 4001)


_begin()
os.register_at_fork(after_in_child=_begin)


def free_port() -> int:
    """A port that nothing listens on, that no other test process has drawn, and that the system gives to no one."""
    for number in itertools.islice(_numbers, _LAST - _FIRST):
        port = _FIRST + number % (_LAST - _FIRST)
        try:
            fcntl.lockf(_drawn, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return port
    raise AssertionError(f"no port between {_FIRST} and {_LAST} is free")


def free_ports(count: int) -> int:
    """The first of so many such ports in a row, as several servers of one run take them."""
    while True:
        ports = [free_port() for _ in range(count)]
        if ports[-1] - ports[0] == count - 1:
            return ports[0]
