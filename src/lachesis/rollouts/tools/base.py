"""Errors of tools that a server answers, and the interface of such a server for a toolbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lachesis.common.errors import LachesisError


class ToolServerLost(LachesisError):
    """Error for a tool's server that is gone, with its state: the rollout is not at fault, the call has no answer."""


class ToolError(Exception):
    """A server's answer to a call that failed; the model gets it."""


class ToolServer(Protocol):
    """A server of tools: :class:`lachesis.plugins.environments.mcp_server.McpServer`."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str: ...

    def close(self) -> None: ...
