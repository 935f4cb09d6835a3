"""Tool calls in the text of a model's turn, found by the formats of chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.common.tagged_text import HERMES

# Llama 3 once before all calls; Mistral before them, later before each.
_MARKER = re.compile(r"<\|python_tag\|>|\[TOOL_CALLS\]")
# Mistral's later form, NAME{...}; what follows is JSON.
_NAMED = re.compile(r"\s*[\w.-]+(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = re.compile(r"[\s;,\[\]]*")
_DECODER = json.JSONDecoder()


def written_calls(text: str) -> tuple[str, ...]:
    """Return the calls in the text of a turn, in order and as written, without their marks.

    Formats: Hermes' and Qwen's ``<tool_call>{...}</tool_call>``; Llama 3's ``<|python_tag|>{...}; {...}``; Mistral's
    ``[TOOL_CALLS][{...}, {...}]`` and ``[TOOL_CALLS]NAME{...}``. The latter two mark calls with special tokens, which a
    text may lack: a turn that begins with the JSON of a call counts as one too.
    """
    if found := HERMES.findall(text):
        return tuple(call.strip() for call in found if call.strip())
    unmarked, *marked = _MARKER.split(text)
    return tuple(call for part in marked for call in _marked(part)) if marked else tuple(_json_calls(unmarked))


def _marked(text: str) -> list[str]:
    """Return the calls after a marker; text that is not JSON is one too (Llama's Python calls, truncated JSON)."""
    if (named := _NAMED.match(text)) and (arguments := _json_at(text, named.end())):
        return [text[: arguments[1]].strip()]
    found = [*_json_calls(text)]
    return found or [text.strip()] * bool(text.strip())


def _json_calls(text: str) -> Iterator[str]:
    """Yield consecutive calls from the beginning of the text on, in a list or not."""
    at = _next(text, 0)
    while text.startswith("{", at) and (found := _json_at(text, at)) and _is_call(found[0]):
        yield text[at : found[1]]
        at = _next(text, found[1])


def _next(text: str, at: int) -> int:
    between = _BETWEEN.match(text, at)
    return at if between is None else between.end()


def _json_at(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON value that begins at ``at`` and the place after it; None if none begins there."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):  # the text is whatever a model may say
        return None


def _is_call(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("name"), str) and ("arguments" in value or "parameters" in value)
