"""Ports for servers that start a moment later, or start again."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that Linux gives to outgoing connections and to servers that do not care (ip_local_port_range): one of
# these could be taken before the server starts, or while it is down.
_FIRST, _LAST = 20_000, 32_000
_numbers = itertools.count()


def _begin() -> None:
    """Each test process draws from somewhere else, those with the next numbers from far away."""
    global _numbers
    _numbers = itertools.count(os.getpid() * 4001)


_begin()
os.register_at_fork(after_in_child=_begin)


def free_port() -> int:
    """A port that nothing listens on and that the system gives to no one by itself."""
    for number in itertools.islice(_numbers, _LAST - _FIRST):
        port = _FIRST + number % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
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
