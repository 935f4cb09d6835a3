"""Connections between the leader and its followers: messages, signs of life, and the news that one is gone.

They are apart from torch's collectives, which know of neither: a process that dies is known here at once, whatever
the others are waiting in, and a follower may wait for its next command for hours while it hears that the leader lives.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, TrainingError
from lachesis.train.distributed.messages import decode, encode

_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 32


class Gone(TrainingError):
    """The other side of a link has ended, or the connection to it has."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the leader listens, and the token that a follower shows."""

    host: str
    port: int
    token: bytes


class Link:
    """One connection. Several threads may send; one receives.

    Args:
        connection: connected.
        peer: who is at the other end, in words.
    """

    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self.peer = peer

    def send(self, message: object) -> None:
        """Raises Gone where nobody is there."""
        data = encode(message)
        try:
            with self._sending:
                self._socket.settimeout(None)
                self._socket.sendall(_LENGTH.pack(len(data)))
                self._socket.sendall(data)
        except OSError as error:
            raise self._gone(error) from error

    def receive(self) -> Any:
        """The next message, however long it takes. Raises Gone where none will come that can be read."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        data = self._read(length)
        try:
            return decode(data)
        except TrainingError as error:
            raise Gone(f"{self.peer}: {error.message}", remedy=error.remedy) from error

    def close(self) -> None:
        """End the connection, also under a thread that receives. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            try:
                received = self._socket.recv_into(view[done:])
            except OSError as error:
                raise self._gone(error) from error
            if received == 0:
                raise self._gone(None)
            done += received
        return data

    def _gone(self, error: OSError | None) -> Gone:
        why = f" ({error.strerror or error})" if error is not None else ""
        return Gone(f"{self.peer} has ended without a word{why}", remedy="read what it printed last, or its log")


class Listener:
    """Where followers come in.

    Args:
        host: an address of this machine that they can reach.
        everywhere: listen on all addresses, for followers on other machines.
    """

    def __init__(self, host: str, *, everywhere: bool) -> None:
        self._listener = socket.create_server(("" if everywhere else host, 0), backlog=1024)
        port = self._listener.getsockname()[1]
        self.address = Address(host=host, port=port, token=secrets.token_bytes(_TOKEN_BYTES))

    def admit(self, count: int, *, deadline: Deadline) -> dict[int, Link]:
        """The links of ``count`` followers, by rank.

        Raises:
            DeadlineExceeded: not all came in time.
        """
        links: dict[int, Link] = {}
        with deadline.waiting(), self._listener:
            while len(links) < count:
                self._listener.settimeout(deadline.remaining_s())
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError as error:
                    deadline.check(f"{len(links)} of {count} followers came")
                    raise DeadlineExceeded(f"{deadline.name}: {len(links)} of {count} followers came") from error
                found = _admit_one(connection, token=self.address.token)
                if found is not None:
                    rank, link = found
                    links[rank] = link
        return dict(sorted(links.items()))


def connect(address: Address, *, rank: int, leader: str, deadline: Deadline) -> Link:
    """A follower's link to the leader, who is called ``leader`` in errors.

    Raises:
        Gone: nobody listens there.
    """
    try:
        connection = socket.create_connection((address.host, address.port), timeout=deadline.remaining_s())
        _prepare(connection)
        connection.sendall(address.token)
    except OSError as error:
        raise Gone(
            f"rank {rank} cannot reach the leader at {address.host}:{address.port}: {error.strerror or error}",
            remedy="see whether rank 0 has ended, and whether the network lets other machines reach it",
        ) from error
    link = Link(connection, peer=leader)
    link.send((rank, socket.gethostname(), os.getpid()))
    return link


def _admit_one(connection: socket.socket, *, token: bytes) -> tuple[int, Link] | None:
    """Someone without the token is turned away before anything of theirs is read."""
    connection.settimeout(10.0)
    try:
        shown = b""
        while len(shown) < _TOKEN_BYTES and (part := connection.recv(_TOKEN_BYTES - len(shown))):
            shown += part
    except OSError:
        shown = b""
    if not secrets.compare_digest(shown, token):
        connection.close()
        return None
    _prepare(connection)
    link = Link(connection, peer="a follower")
    rank, host, pid = link.receive()
    link.peer = f"rank {rank} (process {pid} on {host})"
    return rank, link


def _prepare(connection: socket.socket) -> None:
    """Commands are short and go at once; that a machine is gone is noticed by the network's own means."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
