"""Control connections of a channel, which announce each step and notice at once when a peer has gone.

The trainer (rank 0) listens, every other rank connects once. A message is a JSON object. Tensors do not travel here,
but every step of an update is announced here first, so that no rank enters a collective that others will not enter.

Why sockets and not keys of torch's TCPStore, which the process group uses: a store tells nobody that a process has
died. The operating system closes a dead process's connections, which ends the others' waits.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.http import url_host
from lachesis.common.json_values import is_object

PROTOCOL = 3
_LONGEST_HELLO, _LONGEST_MESSAGE = 4096, 64 * 2**20
# Length of a challenge, and of its SHA-256 answer.
_PROOF_BYTES = 32
# Seconds that a listening process has to answer a connection.
_CALL_S = 5.0
# Seconds after which a wait checks again for its deadline and for a cancellation.
_TICK_S = 0.1
# A peer that stops in the middle of a message, or reads nothing for so long, counts as gone.
_STALLED_S = 60

Message = Mapping[str, Any]


class Aborted(EngineError):
    """Error of every wait after :meth:`Links.abort`, with the reason given to that call."""


class PeerFailed(EngineError):
    """Error for a peer that has gone or reports a failure.

    ``rank`` is the peer's rank in the channel.
    """

    def __init__(self, message: str, *, rank: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address where the trainer listens; ``init_method`` has the real port if port 0 was requested.

    A peer that does not know ``secret`` is rejected before anything else is read; an empty secret admits all.
    """

    init_method: str
    listener: socket.socket
    secret: str = ""


def listen(init_method: str, *, secret: str = "") -> Rendezvous:
    """Listen at ``init_method`` ("tcp://host:port"; port 0 takes a free one), on that address only.

    Raises:
        EngineError: no such address, or the port is taken.
    """
    host, port = parse_init_method(init_method)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((str(address[0]), port), family=family, backlog=64)
    except OSError as error:
        raise EngineError(
            f"Failed to setup NCCL bridge: the trainer cannot listen at {init_method} ({error.strerror or error})",
            remedy="use an address of the trainer's host and a free port (port 0 takes any free one)",
        ) from error
    return Rendezvous(f"tcp://{url_host(host)}:{listener.getsockname()[1]}", listener, secret)


def call_off(init_method: str, *, secret: str, reason: str) -> None:
    """End another process's wait in :func:`listen`, if it still waits, with an EngineError that gives the reason."""
    with suppress(OSError), socket.create_connection(parse_init_method(init_method), timeout=_CALL_S) as connection:
        if secret:
            connection.sendall(_answer(secret, _exactly(connection, _PROOF_BYTES)))
        connection.sendall(_encoded({"called off": reason}) + b"\n")


def address_towards(urls: Sequence[str]) -> str:
    """Return this machine's address as servers at ``urls`` reach it: the loopback one if all of them are local.

    Raises:
        EngineError: a server's name is unknown, or no single address serves all.
    """
    found = {_own_address(urlsplit(url)) for url in urls}
    # Servers on this machine reach it by any of its addresses.
    apart = {address for address in found if not ipaddress.ip_address(address).is_loopback} or found
    if len(apart) == 1:
        return url_host(apart.pop())
    raise EngineError(
        f"the servers reach this machine by different addresses ({', '.join(sorted(apart))})",
        remedy="set bridge.init_method to an address that all of them can reach: tcp://HOST:0",
    )


def _own_address(url: SplitResult) -> str:
    """Return the local address of the route to the server; no packet is sent."""
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        family, _, _, _, address = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect(address)
            return str(unsent.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"this machine cannot reach the inference server at {url.netloc}: {error.strerror or error}",
            remedy="correct engine.urls, or set bridge.init_method",
        ) from error


def parse_init_method(init_method: str) -> tuple[str, int]:
    """Return host and port of "tcp://host:port".

    Raises EngineError for anything else.
    """
    with suppress(ValueError):
        parts = urlsplit(init_method)
        if parts.scheme == "tcp" and parts.path in ("", "/") and parts.hostname and parts.port is not None:
            return parts.hostname, parts.port
    message = f"init_method {init_method!r} does not have the form tcp://HOST:PORT"
    raise EngineError(message, remedy="give an address such as tcp://localhost:29500")


class Links:
    """Control connections of one rank: to all others on rank 0, to rank 0 on the others.

    Waiting methods raise EngineError when a peer has gone, has reported a failure, or :meth:`abort` was called,
    and DeadlineExceeded when the deadline passes. One thread uses the links; :meth:`abort` may come from any.
    """

    def __init__(self) -> None:
        self._peers: dict[int, Connection] = {}
        self._unread: dict[int, deque[Message]] = defaultdict(deque)
        self._woken, self._wake = Pipe(duplex=False)
        self.host = ""  # the address under which the peers reach this side
        self._aborted: str | None = None
        self._closing = threading.Lock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks at the other ends."""
        return tuple(sorted(self._peers))

    def accept(
        self, rendezvous: Rendezvous, *, hello: Message, cancel: threading.Event | None, deadline: Deadline
    ) -> None:
        """Admit ranks 1 to ``hello["world_size"] - 1`` (rank 0); refuse the others and tell them why."""
        rendezvous.listener.settimeout(_TICK_S)
        wanted = set(range(1, hello["world_size"]))
        while missing := wanted - set(self._peers):
            self._check(cancel)
            missing_text = f"ranks {sorted(missing)} have not connected to {rendezvous.init_method}"
            deadline.check(missing_text)
            try:
                connection, _ = rendezvous.listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                raise EngineError(f"{rendezvous.init_method} was closed: {missing_text}") from error
            self._let_in(connection, hello=hello, missing=missing, secret=rendezvous.secret)

    def connect(
        self, init_method: str, *, hello: Message, cancel: threading.Event | None, deadline: Deadline, secret: str = ""
    ) -> None:
        """Try to reach the trainer until it listens, and prove knowledge of its ``secret`` (ranks other than 0)."""
        address = parse_init_method(init_method)
        while True:
            self._check(cancel)
            try:
                connection = socket.create_connection(address, timeout=_TICK_S * 10)
                break
            except OSError as error:
                deadline.check(f"the trainer does not answer at {init_method} ({error.strerror or error})")
                (cancel or threading.Event()).wait(_TICK_S)
        try:
            if secret:
                connection.settimeout(_STALLED_S)
                connection.sendall(_answer(secret, _exactly(connection, _PROOF_BYTES)))
            connection.sendall(_encoded(hello) + b"\n")
        except OSError as error:
            raise _gone(0) from error
        self._add(0, connection)

    def send(self, message: Message, *, ranks: Sequence[int] | None = None) -> None:
        """Send to ``ranks``, or to all.

        Raises:
            EngineError: a peer is gone.
        """
        data = _encoded(message)
        for rank in self.ranks if ranks is None else ranks:
            try:
                self._peers[rank].send_bytes(data)
            except (OSError, TypeError) as error:  # TypeError: closed by another thread meanwhile
                self._check(None)
                # A failure that it reported before it left is the better reason.
                while self._peers[rank].poll():
                    self._read(rank)
                raise _gone(rank) from error

    def receive(self, rank: int, *, deadline: Deadline, waiting_for: str) -> Message:
        """Return the next message of a peer."""
        unread = self._unread[rank]
        while not unread:
            remaining = deadline.remaining_s()
            self.watch(_TICK_S if remaining is None else min(_TICK_S, remaining))
            if not unread:
                deadline.check(f"{_who(rank)} has not sent {waiting_for}")
        return unread.popleft()

    def watch(self, timeout_s: float) -> None:
        """Read what has arrived, waiting up to ``timeout_s`` for something. Raises when a peer is lost."""
        self._check(None)
        try:
            ready = wait([self._woken, *self._peers.values()], timeout_s)
        except (OSError, ValueError):  # closed by another thread meanwhile
            self._check(None)
            raise
        self._check(None)
        for rank, connection in self._peers.items():
            if connection in ready:
                self._read(rank)

    def abort(self, reason: str) -> None:
        """Make every wait, now and later, raise EngineError with this reason; callable from any thread."""
        if self._aborted is None:
            self._aborted = reason
            with suppress(OSError):
                self._wake.send_bytes(b"!")

    def report(self, reason: str) -> None:
        """Tell the peers that this side has failed, if they can still be told."""
        for connection in self._peers.values():
            with suppress(OSError):
                connection.send_bytes(_encoded({"failed": reason}))

    def close(self) -> None:
        """Close all connections.

        Idempotent, also if two threads close at once, one waiting and one cancelling.
        """
        self.abort("the channel was closed")
        with self._closing:
            for connection in (*self._peers.values(), self._wake, self._woken):
                connection.close()

    def _let_in(self, connection: socket.socket, *, hello: Message, missing: set[int], secret: str) -> None:
        """Admit a matching rank, and reject any other connection."""
        connection.settimeout(1.0)
        if secret and not _knows(connection, secret):
            connection.close()
            return
        told: Any = None
        # Without a buffer, so that what comes after the line stays in the socket.
        with suppress(OSError, ValueError), connection.makefile("rb", buffering=0) as stream:
            told = json.loads(stream.readline(_LONGEST_HELLO))
        if is_object(told) and "called off" in told:
            connection.close()
            raise EngineError(f"connecting the weight channel was cancelled: {told['called off']}")
        if not is_object(told) or "protocol" not in told:
            connection.close()
            return
        rank = told.get("rank")
        unlike = [key for key in hello if key != "rank" and told.get(key) != hello[key]]
        if not unlike and rank in missing:
            self._add(rank, connection)
            return
        key, ours = (unlike[0], hello[unlike[0]]) if unlike else ("rank", f"one of {sorted(missing)}")
        reason = f"the engine has {key} {told.get(key)!r}, but the trainer expects {ours!r}"
        with suppress(OSError), _linked(connection) as link:
            link.send_bytes(_encoded({"failed": reason}))
        if unlike:
            raise EngineError(
                f"vLLM NCCL setup failed: {reason}", remedy="use the same version and settings on both sides"
            )

    def _add(self, rank: int, connection: socket.socket) -> None:
        self.host = self.host or connection.getsockname()[0]
        self._peers[rank] = _linked(connection)

    def _read(self, rank: int) -> None:
        """Take one message, or raise the failure that it reports."""
        try:
            message = json.loads(self._peers[rank].recv_bytes(_LONGEST_MESSAGE))
        except (OSError, EOFError, TypeError) as error:  # TypeError as in send()
            self._check(None)
            raise _gone(rank) from error
        except ValueError as error:
            raise EngineError(
                f"{_who(rank)} sent an invalid message", remedy="find out which program connects to the channel"
            ) from error
        if "failed" in message:
            reason = f"{_who(rank)} reports: {message['failed']}"
            raise PeerFailed(reason, rank=rank, remedy="read the other side's log")
        self._unread[rank].append(message)

    def _check(self, cancel: threading.Event | None) -> None:
        if self._aborted is not None:
            raise Aborted(f"the weight channel was aborted: {self._aborted}")
        if cancel is not None and cancel.is_set():
            raise EngineError("connecting the weight channel was cancelled")


def _knows(connection: socket.socket, secret: str) -> bool:
    """Return True if the other side answers a new challenge correctly.

    Only a side that has the secret can; the secret itself is not transmitted.
    """
    challenge = secrets.token_bytes(_PROOF_BYTES)
    try:
        connection.sendall(challenge)
        return hmac.compare_digest(_exactly(connection, _PROOF_BYTES), _answer(secret, challenge))
    except OSError:
        return False


def _answer(secret: str, challenge: bytes) -> bytes:
    return hmac.digest(secret.encode(), challenge, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes.

    Raises OSError if the other side ends, or stalls, before.
    """
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the other side has closed the connection")
        received += part
    return received


def _linked(connection: socket.socket) -> Connection:
    """Return the same connection, wrapped for whole messages."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _STALLED_S, 0))
    return Connection(connection.detach())


def _encoded(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _gone(rank: int) -> PeerFailed:
    message = f"{_who(rank)} closed its end of the weight channel, or died"
    return PeerFailed(message, rank=rank, remedy="read the log of that process")


def _who(rank: int) -> str:
    return "the trainer (rank 0)" if rank == 0 else f"the engine (rank {rank})"
