"""Tools that the model calls, Python functions and MCP servers: how a model writes a call, and the turns around it."""

from lachesis.rollouts.tools.parsers import load_parser
from lachesis.rollouts.tools.toolbox import Toolbox, load_tools, tool_schemas

__all__ = ["Toolbox", "load_parser", "load_tools", "tool_schemas"]
