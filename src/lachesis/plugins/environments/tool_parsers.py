"""vLLM's own parsers of tool calls, for texts that any engine sampled: they need vLLM installed, and no server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from lachesis.common.errors import ConfigError, DependencyError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEARCHES = frozenset(("search", "match", "fullmatch", "findall", "finditer", "split", "splititer", "sub", "subn"))
_MODULES = ("vllm.tool_parsers", "vllm.parser")
Tools: TypeAlias = Sequence[Mapping[str, Any]]
# A call of a tool: its name, and its arguments as JSON in a text.
NamedCall: TypeAlias = tuple[str, str]


def vllm_parser(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> Callable[[str, Tools], tuple[str, tuple[NamedCall, ...]]]:
    """Return a function that finds the calls in the text of a turn, given the turn's tools.

    Args:
        name: the name, as for vLLM's ``--tool-call-parser``.
        tokenizer: the model's; some parsers look for its special tokens.

    Raises:
        DependencyError: vLLM is not installed.
        ConfigError: it has no such parser, or the parser does not support the tokenizer.
    """
    try:
        from lachesis.engines.vllm import compat
    except ImportError as error:
        raise DependencyError(
            f"source.tool_parser vllm:{name} needs vLLM in the trainer's environment, but it is not installed",
            remedy="pip install 'lachesis[vllm]', or use hermes or your own function",
        ) from error
    parsers, cached = compat.tool_parsers(), compat.cached_tokenizer(tokenizer)
    if name not in (known := parsers.list_registered()):
        remedy = did_you_mean(name, known, otherwise=f"it has {', '.join(known)}")
        raise ConfigError(f"vLLM has no tool parser {name!r}", remedy=remedy)
    # Parsers log a traceback for each text that is not a call, and a model in training writes many.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    made = parsers.get_tool_parser(name)

    def parse(text: str, tools: Tools) -> tuple[str, tuple[NamedCall, ...]]:
        request = compat.chat_request({"messages": [], "tools": [dict(tool) for tool in tools] or None})
        parser = _bounded(made(cached, request.tools))  # a new parser for each text, as in vLLM
        found = parser.extract_tool_calls(text, request)
        calls = tuple((call.function.name, call.function.arguments) for call in found.tool_calls)
        return (found.content or "", calls) if found.tools_called else (text, ())

    try:
        parse("", ())
    except Exception as error:  # parsers differ in their requirements and errors
        raise ConfigError(
            f"vLLM's tool parser {name!r} does not work with this model: {error}", remedy="name the model's own parser"
        ) from error
    import regex  # of vLLM, whose patterns are all made with it

    for module in [module for name, module in sys.modules.items() if name.startswith(_MODULES)]:
        for field, value in list(vars(module).items()):
            if isinstance(value, regex.Pattern) or value is regex:
                setattr(module, field, _BoundedPattern(value))
    return parse


def _bounded(parser: Any) -> Any:
    """Let the parser's own patterns give up in time: on 2,000 spaces one of vLLM's takes 13 s."""
    import regex

    for fields in (*map(vars, reversed(type(parser).__mro__)), dict(vars(parser))):
        for name, value in fields.items():
            if isinstance(value, regex.Pattern):
                setattr(parser, name, _BoundedPattern(value))
    return parser


class _BoundedPattern:
    """Pattern, or the module, whose searches raise TimeoutError after a second, in which they hold the interpreter."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pattern, name)
        return partial(found, timeout=1.0) if name in _SEARCHES else found
