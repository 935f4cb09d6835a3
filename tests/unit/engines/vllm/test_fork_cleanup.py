from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from lachesis.plugins.serving.vllm_launch import leave_to_server

FORK = get_context("fork")


@contextmanager
def forked(look: Callable[[], object]) -> Iterator[Connection]:
    """A process that leaves to the server what is the server's; out of the connection comes what ``look`` returns."""
    reading, writing = FORK.Pipe(duplex=False)

    def run() -> None:
        leave_to_server()
        writing.send(look())

    child = FORK.Process(target=run)
    child.start()
    writing.close()
    try:
        yield reading
    finally:
        child.join(30)


def test_who_connects_once_the_server_is_gone_is_refused_though_its_engine_lives():
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    gone, waiting = socket.socketpair()

    def look() -> str:
        waiting.recv(1)  # the server is gone by now
        return _answer_at(address)

    with socket.create_connection(address) as client, listening.accept()[0] as served, gone, waiting:
        with forked(look) as answer:
            listening.close()
            gone.sendall(b"x")
            assert answer.poll(30) and answer.recv() == "refused"
        client.sendall(b"y")
        assert served.recv(1) == b"y", "connections that stand are nobody else's business"


def test_a_port_at_which_the_server_listens_only_once_its_engine_has_started_is_not_kept_either():
    gone, waiting = socket.socketpair()
    with socket.socket() as bound, gone, waiting:
        bound.bind(("127.0.0.1", 0))  # as vLLM's does
        address = bound.getsockname()

        def look() -> str:
            waiting.sendall(b"x")
            waiting.recv(1)
            return _answer_at(address)

        with forked(look) as answer:
            gone.recv(1)
            bound.listen()
            bound.close()
            gone.sendall(b"x")
            assert answer.poll(30) and answer.recv() == "refused"


def test_files_and_connections_stay_open_and_what_listens_does_not():
    one, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, one, other:
        reading, writing = os.pipe()

        def look() -> list[bool]:
            return [_is_open(number) for number in (listening.fileno(), one.fileno(), reading, writing)]

        with forked(look) as answer:
            assert answer.poll(30) and answer.recv() == [False, True, True, True]
        assert _is_open(listening.fileno()), "the server's own"
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_signal_to_the_engine_is_none_to_the_server(leaves: bool):
    """Python writes each signal's number to the descriptor that an event loop has set: that of the parent."""
    loop, wakeup = socket.socketpair()
    with loop, wakeup:
        wakeup.setblocking(False)
        before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        handler = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:

            def run() -> None:
                # As it is inherited, where no other test has had forked processes forget it.
                signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
                if leaves:
                    leave_to_server()
                os.kill(os.getpid(), signal.SIGUSR1)

            child = FORK.Process(target=run)
            child.start()
            child.join(30)
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGUSR1, handler)
        loop.setblocking(False)
        heard = b""
        with suppress(BlockingIOError):
            heard = loop.recv(64)
        assert (bytes([signal.SIGUSR1]) in heard) == (not leaves)


def _answer_at(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, timeout=5).close()
    except ConnectionRefusedError:
        return "refused"
    return "taken"


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
