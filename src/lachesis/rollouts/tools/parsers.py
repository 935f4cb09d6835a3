"""Parsers of tool calls in the text of a turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lachesis.common.errors import ConfigError
from lachesis.common.imports import describe_exception, load_function
from lachesis.common.json_values import read_json
from lachesis.rollouts.tagged_text import HERMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VLLM = "vllm:"
"""Prefix of the names of vLLM's parsers."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. If it is malformed, ``error`` says why, and the model gets that as the answer."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn of the model: its text, and its tool calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()


Tools: TypeAlias = Sequence[Mapping[str, Any]]


class ToolParser(Protocol):
    """Parser of a turn's text, without its end token, given the model's tools."""

    def __call__(self, text: str, tools: Tools = (), /) -> ParsedTurn: ...


def hermes(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse one or several ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write."""
    said, *parts = HERMES.split(text)  # text, a call, text, a call, ..., text
    if not parts:
        return ParsedTurn(text)
    return ParsedTurn("".join([said, *parts[1::2]]).strip(), tuple(_hermes_call(call) for call in parts[::2]))


def hermes_opening(name: str = "") -> str:
    """Return the text with which a call in the format of :func:`hermes` begins, of any tool or of the one named."""
    return "<tool_call>\n" + (f'{{"name": {json.dumps(name)}, "arguments":' if name else '{"name":')


def _hermes_call(text: str) -> ToolCall:
    try:
        call = read_json(text)
    except ValueError as error:
        return ToolCall("", error=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", error='the call does not have the form {"name": ..., "arguments": {...}}')
    return _checked(call["name"], call.get("arguments", {}))


PARSERS: Mapping[str, ToolParser] = {"hermes": hermes}


def load_parser(
    spec: str, base_dir: Path | None = None, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> ToolParser:
    """Load a parser by its name, one of vLLM's as ``vllm:NAME``, or a function of the user by its import path.

    The function takes the text of a turn and returns ``(content, calls)`` or the calls alone; each call is a mapping
    with ``name`` and ``arguments``.

    Args:
        spec: name or import path.
        base_dir: for relative paths.
        tokenizer: the model's, which vLLM's parsers need.

    Raises:
        ConfigError: it cannot be loaded; later, from the parser itself, that it raised or returned something else.
        DependencyError: it is vLLM's, and vLLM is not installed.
    """
    if (known := PARSERS.get(spec)) is not None:
        return known
    if spec.startswith(VLLM):
        assert tokenizer is not None, "a configuration that names vLLM's parser has a model"
        return _vllm_parser(spec.removeprefix(VLLM), tokenizer)
    if "." not in spec and ":" not in spec:
        raise ConfigError(
            f"source.tool_parser {spec!r} does not exist",
            remedy=f"choose one of {', '.join(PARSERS)} or {VLLM}NAME, or name a function as module.function or "
            "FILE.py:FUNCTION",
        )
    function = load_function(spec, base_dir)

    def parse(text: str, tools: Tools = ()) -> ParsedTurn:
        try:
            found = function(text)
            content, calls = found if isinstance(found, tuple) and len(found) == 2 else (text, found)
            return ParsedTurn(str(content), tuple(_given(call) for call in _listed(calls)))
        except Exception as error:
            raise ConfigError(
                f"the tool parser {spec!r} failed: {describe_exception(error, function)}",
                remedy='let it return (content, [{"name": ..., "arguments": {...}}, ...]) for any text',
            ) from error

    return parse


def _vllm_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    """Wrap a parser of vLLM's; if it cannot read a text, the model is told, as for a call that is not JSON."""
    from lachesis.plugins.environments.tool_parsers import vllm_parser

    find = vllm_parser(name, tokenizer)

    def parse(text: str, tools: Tools = ()) -> ParsedTurn:
        try:
            content, calls = find(text, tools)
        except Exception as error:  # parsers are vLLM's code, and the model may write any text
            return ParsedTurn(text, (ToolCall("", error=f"the call cannot be read: {error}"),))
        return ParsedTurn(content, tuple(_checked(*call) for call in calls))

    return parse


def _listed(calls: object) -> Sequence[Any]:
    if calls is None:
        return ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
        raise TypeError(f"it returned {type(calls).__name__}, not a list of calls")
    return list(calls)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _given(call: Any) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    return _checked(str(call["name"]), call.get("arguments", {}))


def _checked(name: str, arguments: object) -> ToolCall:
    """Return a call, or its error; the arguments may be JSON in a text, as in OpenAI's format."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except ValueError as error:
            return ToolCall(name, error=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ToolCall(name, error="the arguments are not an object")
    return ToolCall(name, {str(key): value for key, value in arguments.items()})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
