"""Applications served by threads of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from lachesis.process.threads import LoopThread
from tests.waiting import LONG_S


class Thread:
    """An application that is served until :meth:`stop`; ``loop`` is that of its thread."""

    def __init__(self, app: Starlette, *, port: int = 0, lifespan: bool = False) -> None:
        config = uvicorn.Config(
            app, port=port, log_config=None, http="httptools", ws="none", lifespan="on" if lifespan else "off"
        )
        self._server = _Server(config)
        self._socket = config.bind_socket()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Connections wait from now on, instead of being refused until the loop runs.
        self._socket.listen(128)
        self.port = self._socket.getsockname()[1]
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End as if killed: what is in flight is lost. Idempotent."""
        if self.running:
            self.loop.call_soon_threadsafe(self._server.told_to_end.set)
            self._thread.join(LONG_S)
            assert not self.running

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))


class _Server(uvicorn.Server):
    """Ends when it is told to; the original looks ten times a second whether it was."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told_to_end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.told_to_end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@contextmanager
def listening(server: Listens) -> Iterator[None]:
    """Within it a server of an event loop listens, on the loop of a thread of its own."""
    loop = LoopThread("test-server", what="the test's server")
    loop.run(server.start())
    try:
        yield
    finally:
        loop.close(server.stop)


class Listens(Protocol):
    """A server that starts and stops on the running loop."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...
