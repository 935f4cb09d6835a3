"""Tools that the model calls in a rollout: Python functions, how a model writes a call, and the turns around them."""

from lachesis.rollouts.tools.functions import Toolbox, load_tools
from lachesis.rollouts.tools.parsers import load_parser

__all__ = ["Toolbox", "load_parser", "load_tools"]
