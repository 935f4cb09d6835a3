"""Anthropic's Messages: parses bodies to requests, and formats turns as answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.common.types import Message
from lachesis.plugins.environments.agents.requests import (
    Asked,
    AssistantTurn,
    BadRequest,
    Event,
    arguments_of,
    assistant,
    limit_of,
    list_of,
    schema_of,
    stops_of,
    text_of,
)

_LEFT_OUT = ("thinking", "redacted_thinking")


def read(body: Mapping[str, Any]) -> Asked:
    """Parse a body. Sampling parameters are the run's, so the agent's temperature is ignored.

    Raises:
        BadRequest: it is malformed, or asks for a tool that Anthropic runs.
    """
    choice = body.get("tool_choice") or {}
    tools = [] if choice.get("type") == "none" else list_of(body, "tools")
    if odd := [tool.get("type") for tool in tools if tool.get("type") not in (None, "custom")]:
        raise BadRequest(f"a tool is of type {odd[0]!r}; only functions are supported")
    system: list[Message] = [{"role": "system", "content": text_of(body["system"])}] if body.get("system") else []
    said = [message for one in list_of(body, "messages") for message in _messages(one)]
    return Asked(
        messages=(*system, *said),
        tools=tuple({"type": "function", "function": _function(tool)} for tool in tools),
        max_tokens=limit_of(body.get("max_tokens")),
        stop=stops_of(body.get("stop_sequences")),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or "policy"),
        forced=str(choice["name"]) if choice.get("type") == "tool" else "" if choice.get("type") == "any" else None,
        schema=schema_of((body.get("output_config") or {}).get("format") or body.get("output_format")),
    )


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool["name"], **described, "parameters": tool.get("input_schema") or {}}


def _messages(one: Mapping[str, Any]) -> Iterator[Message]:
    """Yield a message as those of chat templates: answers of tools are separate messages, before its other content."""
    role, content = one.get("role"), one.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(f"a message has the role {role!r}")
    if not isinstance(content, list):
        yield {"role": role, "content": text_of(content)}
        return
    blocks = [block for block in content if isinstance(block, dict) and block.get("type") not in _LEFT_OUT]
    texts = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result")]
    if role == "assistant":
        used = [block for block in blocks if block.get("type") == "tool_use"]
        calls = [(str(block["id"]), str(block["name"]), arguments_of(block.get("input", {}))) for block in used]
        yield assistant(text_of(texts), calls)
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {
                "role": "tool",
                "content": text_of(block.get("content")),
                "tool_call_id": str(block.get("tool_use_id")),
            }
    if texts:
        yield {"role": "user", "content": text_of(texts)}


def answer(turn: AssistantTurn) -> dict[str, Any]:
    """Return the document of a turn."""
    return _begun(turn) | {
        "content": list(_blocks(turn)),
        "stop_reason": _reason(turn),
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": turn.tokens},
    }


def events(turn: AssistantTurn) -> Iterator[Event]:
    """Yield the answer as a stream, in as few events as clients need."""
    for name, data in _events(turn):
        yield name, {"type": name} | data


def _events(turn: AssistantTurn) -> Iterator[Event]:
    yield "message_start", {"message": _begun(turn)}
    for index, block in enumerate(_blocks(turn)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            call = next(call for call in turn.calls if call.id == block["id"])
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": call.json}
        yield "content_block_start", {"index": index, "content_block": empty}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ending = {"stop_reason": _reason(turn), "stop_sequence": None}
    yield "message_delta", {"delta": ending, "usage": {"output_tokens": turn.tokens}}
    yield "message_stop", {}


def _blocks(turn: AssistantTurn) -> Iterator[dict[str, Any]]:
    if turn.content or not turn.calls:
        yield {"type": "text", "text": turn.content}
    for call in turn.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _reason(turn: AssistantTurn) -> str:
    if turn.calls:
        return "tool_use"
    return "max_tokens" if turn.finish_reason == "length" else "end_turn"


def _begun(turn: AssistantTurn) -> dict[str, Any]:
    return {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": turn.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": 0},
    }
