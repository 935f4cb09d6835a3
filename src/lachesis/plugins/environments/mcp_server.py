"""Tools of an MCP server, a child process or a remote one: one connection, reopened when it breaks."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from lachesis.common.errors import ConfigError
from lachesis.common.imports import optional_package
from lachesis.process.threads import LoopThread
from lachesis.rollouts.tools.base import ToolError, ToolServerLost

if TYPE_CHECKING:
    from mcp import Client

    from lachesis.config.schema import McpServerConfig

_START_S = 60.0
_STOP_S = 10.0
# Seconds for a single request; the toolbox limits calls.
_HTTP_S = 3600.0
_SHOWN_LOG = 500
_MOST_PAGES = 100


@dataclass(frozen=True, slots=True)
class Described:
    """A tool as its server describes it; ``schema`` is in the format of chat templates."""

    name: str
    schema: Mapping[str, Any]


class McpServer:
    """Client of one server, with many calls at the same time, on an event loop in its own thread.

    Anything that breaks the connection (a process that ends, an address that no longer answers) fails the calls in
    flight with :class:`ToolServerLost`; the next call opens a new connection.

    Args:
        address: a command that speaks over its standard streams, or a URL of streamable HTTP.
    """

    def __init__(self, address: McpServerConfig) -> None:
        self._address = address
        self._loop = LoopThread("lachesis-mcp", what="the connection to the MCP server")
        self._connecting: asyncio.Lock | None = None
        self._connection: _Connection | None = None
        self.starts = 0

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return self._address.url or " ".join(self._address.command)

    def tools(self) -> list[Described]:
        """Return the server's tools. Raises ConfigError if it does not start or has none."""
        try:
            found = self._loop.run(self._list())
        except ToolServerLost as error:
            raise ConfigError(error.message, remedy=error.remedy) from error
        if not found:
            raise ConfigError(f"the MCP server {self.name!r} has no tools", remedy="remove it from source.tools")
        return found

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of an answer. Cancelled with its caller.

        Raises:
            ToolError: the server reports a failure; the text is for the model.
            ToolServerLost: the server is gone.
        """
        return await asyncio.wrap_future(self._loop.submit(self._call(tool, arguments)))

    def close(self) -> None:
        """End the connection, and with it a process that was started for it. Idempotent."""
        self._loop.close(self._disconnect)

    async def _list(self) -> list[Described]:
        client = (await self._connected()).client
        found: list[Described] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            for one in page.tools:
                shown = {"name": one.name, "description": one.description or "", "parameters": dict(one.input_schema)}
                found.append(Described(one.name, {"type": "function", "function": shown}))
            if (cursor := page.next_cursor) is None:
                break
        return found

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = await self._connected()
        try:
            result = await connection.client.call_tool(tool, dict(arguments))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            raise await self._lost(connection) from error
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _connected(self) -> _Connection:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._connection is None or self._connection.over:
                self._connection = await _Connection.open(self._address, name=self.name)
                self.starts += 1
            return self._connection

    async def _lost(self, connection: _Connection) -> ToolServerLost:
        await connection.close()
        return ToolServerLost(
            f"the MCP server {self.name!r} closed the connection during a call{connection.last_words()}",
            remedy="the next call starts it again; find out why it ends",
        )

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class _Connection:
    """Client in its own task, because the library requires that one task enters and leaves it."""

    def __init__(self, address: McpServerConfig, log: TextIO) -> None:
        self._address = address
        self._log = log
        self._end = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold())
        self.client: Client

    @classmethod
    async def open(cls, address: McpServerConfig, *, name: str) -> _Connection:
        """Open a connection that answers. Raises ToolServerLost with the reason."""
        why = "source.tools names an MCP server, but the package mcp is not installed"
        optional_package("mcp", why, remedy="pip install 'lachesis[mcp]'")
        log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 -- is there as long as the connection
        made = cls(address, log)
        try:
            await asyncio.wait([made._task, made._ready], timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            made._task.cancel()
            raise
        if made._ready.done():
            made.client = made._ready.result()
            return made
        why = _cause(made._task.exception()) if made._task.done() else f"it did not answer within {_START_S:g} s"
        made._task.cancel()
        await made.close()
        raise ToolServerLost(
            f"the MCP server {name!r} cannot be started or reached: {why}{made.last_words()}",
            remedy="try its command or address by hand",
        )

    @property
    def over(self) -> bool:
        """Return True if the connection broke or was closed."""
        return self._task.done()

    async def close(self) -> None:
        """Close the client; the library kills a process that does not end. Idempotent."""
        self._end.set()
        await asyncio.wait([self._task], timeout=_STOP_S)
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # the call that failed reports the reason
            await self._task

    def last_words(self) -> str:
        """Return the end of a process's standard error, as part of a message."""
        file = self._log.fileno()
        text = (
            os.pread(file, _SHOWN_LOG, max(0, os.fstat(file).st_size - _SHOWN_LOG)).decode("utf-8", "replace").strip()
        )
        return f"; its last output: {text}" if text else ""

    async def _hold(self) -> None:
        from mcp import Client

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(await _transport(self._address, self._log, stack)))
            self._ready.set_result(client)
            await self._end.wait()


async def _transport(address: McpServerConfig, log: TextIO, stack: AsyncExitStack) -> Any:
    """Return the client's transport.

    A process gets the variables of ``env`` and a few harmless ones of this process.
    """
    if address.command:
        from mcp import StdioServerParameters, stdio_client

        program, *arguments = address.command
        return stdio_client(StdioServerParameters(command=program, args=arguments, env=dict(address.env)), errlog=log)
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(address.headers), timeout=_HTTP_S))
    return streamable_http_client(address.url, http_client=http)


def _text(block: Any) -> str:
    """Return a part of an answer as text for the model; other kinds of parts are named."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.type}, which cannot be shown as text]"


def _cause(error: BaseException | None) -> str:
    """Return the first error in the exception groups that the library's tasks end with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return f"{type(error).__name__}: {error}" if error is not None else "it ended"
