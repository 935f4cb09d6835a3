"""Control connections of a channel: who is there, what comes next, and at once when somebody is gone.

The trainer (rank 0) listens, every other rank connects once. A message is one line of JSON. Tensors do not travel
here, but every step of an update is announced here first, so that nobody enters a collective that the others will
not enter; and the operating system closes a dead process's connection, which the others see in whatever they wait for.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError

PROTOCOL = 1
_LONGEST_LINE = 64 * 2**20
# A wait looks this often at its deadline and at whether it was called off.
_TICK_S = 0.1

Message = Mapping[str, Any]


class Aborted(EngineError):
    """This side called :meth:`Links.abort`: why is what that call was given."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The trainer's open door: ``init_method`` has the real port where port 0 was asked for."""

    init_method: str
    listener: socket.socket


@dataclass(slots=True)
class _Peer:
    rank: int
    socket: socket.socket
    unread: bytes = b""
    messages: deque[Message] = field(default_factory=deque)


def open_door(init_method: str) -> Rendezvous:
    """Listen where ``init_method`` says ("tcp://host:port"; port 0 takes a free one), on that address only.

    Raises:
        EngineError: no such address, or the port is taken.
    """
    host, port = parse_init_method(init_method)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=64)  # type: ignore[arg-type]
    except OSError as error:
        raise EngineError(
            f"Failed to setup NCCL bridge: the trainer cannot listen at {init_method} ({error.strerror or error})",
            remedy="name an address of the trainer's host and a port that is free (port 0 takes any)",
        ) from error
    return Rendezvous(f"tcp://{host}:{listener.getsockname()[1]}", listener)


def parse_init_method(init_method: str) -> tuple[str, int]:
    """Host and port of "tcp://host:port". Raises EngineError for anything else."""
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        if parts.scheme != "tcp" or parts.path not in ("", "/"):
            host = None
    if host is None or port is None:
        raise EngineError(f"init_method {init_method!r} is no tcp://HOST:PORT", remedy="as in tcp://localhost:29500")
    return host, port


class Links:
    """The control connections of one rank: to all others on rank 0, to rank 0 on the others.

    Waiting methods raise EngineError when a peer has gone, has reported a failure, or :meth:`abort` was called,
    and DeadlineExceeded when the deadline passes. One thread uses the links; :meth:`abort` may come from any.
    """

    def __init__(self) -> None:
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._aborted: str | None = None
        self._closed = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at the other ends."""
        return tuple(sorted(self._peers))

    def local_host(self) -> str:
        """The address by which the peers reach this side."""
        return next(iter(self._peers.values())).socket.getsockname()[0]

    def accept(self, door: Rendezvous, *, hello: Message, cancel: threading.Event | None, deadline: Deadline) -> None:
        """Rank 0: let in ranks 1 to ``hello["world_size"] - 1``; those that do not fit are told why and refused."""
        door.listener.settimeout(_TICK_S)
        wanted = set(range(1, hello["world_size"]))
        while missing := wanted - set(self._peers):
            self._check(cancel)
            missing_text = f"rank {sorted(missing)} did not come to {door.init_method}"
            deadline.check(missing_text)
            try:
                connection, _ = door.listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                raise EngineError(f"the door at {door.init_method} was closed while {missing_text}") from error
            self._let_in(connection, hello=hello, missing=missing)

    def connect(self, init_method: str, *, hello: Message, cancel: threading.Event | None, deadline: Deadline) -> None:
        """Other ranks: knock at the trainer's door until it opens."""
        address = parse_init_method(init_method)
        while True:
            self._check(cancel)
            try:
                connection = socket.create_connection(address, timeout=_TICK_S * 10)
                break
            except OSError as error:
                deadline.check(f"nobody answers at {init_method} ({error.strerror or error})")
                (cancel or threading.Event()).wait(_TICK_S)
        self._add(0, connection)
        self.send(hello)

    def send(self, message: Message, *, ranks: Sequence[int] | None = None) -> None:
        """Send to ``ranks``, or to all.

        Raises:
            EngineError: a peer is gone.
        """
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        for rank in self.ranks if ranks is None else ranks:
            try:
                self._peers[rank].socket.sendall(data)
            except OSError as error:
                # What it said before it left is the better reason.
                self.watch(0.0)
                raise self._gone(rank) from error

    def receive(self, rank: int, *, deadline: Deadline, waiting_for: str) -> Message:
        """The next message of a peer."""
        peer = self._peers[rank]
        while not peer.messages:
            remaining = deadline.remaining_s()
            self.watch(_TICK_S if remaining is None else min(_TICK_S, remaining))
            if not peer.messages:
                deadline.check(f"{_who(rank)} has not sent {waiting_for}")
        return peer.messages.popleft()

    def watch(self, timeout_s: float) -> None:
        """Read what has arrived, waiting up to ``timeout_s`` for something; raises when a peer is lost."""
        self._check(None)
        try:
            ready = self._selector.select(timeout_s)
        except (OSError, ValueError):  # closed by another thread meanwhile
            self._check(None)
            raise
        self._check(None)
        for key, _ in ready:
            if key.data is not None:
                self._read(key.data)

    def abort(self, reason: str) -> None:
        """Make every wait, now and later, raise EngineError with this reason; from any thread."""
        if self._aborted is None:
            self._aborted = reason
        with suppress(OSError):
            self._wake.send(b"!")

    def report(self, reason: str) -> None:
        """Tell the peers that this side has failed, if they can still be told."""
        data = json.dumps({"failed": reason}).encode() + b"\n"
        for peer in self._peers.values():
            with suppress(OSError):
                peer.socket.settimeout(1.0)
                peer.socket.sendall(data)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.abort("the channel was closed")
        self._selector.close()
        for peer in self._peers.values():
            peer.socket.close()
        self._wake.close()
        self._woken.close()

    def _let_in(self, connection: socket.socket, *, hello: Message, missing: set[int]) -> None:
        """Admit a rank that fits. Whatever else knocks at the port is turned away."""
        connection.settimeout(1.0)
        try:
            line, _, rest = _first_line(connection).partition(b"\n")
            told: Any = json.loads(line)
        except (OSError, ValueError):
            connection.close()
            return
        if not isinstance(told, dict) or "protocol" not in told:
            connection.close()
            return
        rank = told.get("rank")
        unlike = [key for key in hello if key != "rank" and told.get(key) != hello[key]]
        if unlike or rank not in missing:
            key, ours = (unlike[0], hello[unlike[0]]) if unlike else ("rank", f"one of {sorted(missing)}")
            reason = f"the engine came with {key} {told.get(key)!r}, the trainer expects {ours!r}"
            with suppress(OSError):
                connection.sendall(json.dumps({"failed": reason}).encode() + b"\n")
            connection.close()
            if unlike:
                raise EngineError(
                    f"vLLM NCCL setup failed: {reason}", remedy="run the same version and settings on both sides"
                )
            return
        self._add(rank, connection)
        self._take(self._peers[rank], rest)

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(rank, connection)
        self._peers[rank] = peer
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 20)
        except OSError:
            self._check(None)
            data = b""
        if not data:
            raise self._gone(peer.rank)
        self._take(peer, data)

    def _take(self, peer: _Peer, data: bytes) -> None:
        """Split what has arrived into messages; a failure that is reported is raised."""
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        if len(peer.unread) > _LONGEST_LINE:
            raise EngineError(f"{_who(peer.rank)} sends no control messages", remedy="look who connects to the channel")
        for line in lines:
            message = json.loads(line)
            if "failed" in message:
                raise EngineError(
                    f"{_who(peer.rank)} reports: {message['failed']}", remedy="look at the other side's log"
                )
            peer.messages.append(message)

    def _check(self, cancel: threading.Event | None) -> None:
        if self._aborted is not None:
            raise Aborted(f"the weight channel was aborted: {self._aborted}")
        if cancel is not None and cancel.is_set():
            raise EngineError("the weight channel was called off while it connected")

    def _gone(self, rank: int) -> EngineError:
        return EngineError(
            f"{_who(rank)} closed its end of the weight channel, or died", remedy="look at the log of that process"
        )


def _first_line(connection: socket.socket) -> bytes:
    """What a stranger sends up to its first line's end, and what happened to come with it."""
    data = b""
    while b"\n" not in data and len(data) < 4096 and (more := connection.recv(4096)):
        data += more
    return data


def _who(rank: int) -> str:
    return "the trainer (rank 0)" if rank == 0 else f"the engine (rank {rank})"
