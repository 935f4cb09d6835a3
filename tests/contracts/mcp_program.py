"""An MCP server of a few tools, written with the protocol's own package: over standard streams, or at a port."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers", log_level="WARNING")
counted = 0


@server.tool()
def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


@server.tool()
async def sleep(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def refuse(why: str) -> str:
    """Say no."""
    raise ToolError(f"no: {why}")


@server.tool()
def count() -> int:
    """How often this was asked since the server began."""
    global counted
    counted += 1
    return counted


@server.tool()
def environment(name: str) -> str:
    """A variable that the server was given."""
    return os.environ.get(name, "unset")


@server.tool()
def die() -> str:
    """End the server."""
    sys.stderr.write("I was told to die\n")
    sys.stderr.flush()
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
