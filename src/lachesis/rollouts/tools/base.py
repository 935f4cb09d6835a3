"""Errors of tools that a server answers, and the interface of such a server for a toolbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lachesis.common.errors import LachesisError


class ToolServerLost(LachesisError):
    """The server of a tool broke off, and its state with it: no fault of the rollout, and no answer to the call."""


class ToolError(Exception):
    """A server's answer to a call that it could not do; the model is told."""


class ToolServer(Protocol):
    """A server of tools: :class:`lachesis.plugins.environments.mcp_server.McpServer`."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str: ...

    def close(self) -> None: ...
