"""Tools that the model calls, Python functions and MCP servers: how a model writes a call, and the turns around it."""

from lachesis.rollouts.tools.functions import Toolbox, load_tools, tool_schemas
from lachesis.rollouts.tools.parsers import load_parser

__all__ = ["Toolbox", "load_parser", "load_tools", "tool_schemas"]
