"""OpenAI's Responses: parses bodies to requests, and formats turns as answers. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lachesis.common.types import Message
from lachesis.plugins.environments.agents.requests import (
    Asked,
    AssistantCall,
    AssistantTurn,
    BadRequest,
    Event,
    arguments_of,
    assistant,
    forced_of,
    limit_of,
    list_of,
    schema_of,
    text_of,
)


def read(body: Mapping[str, Any], *, before: Sequence[Message] = ()) -> Asked:
    """Parse a body; ``before`` are the messages up to and including the response that it continues.

    Raises:
        BadRequest: it is malformed, or asks for a tool that is not a function.
    """
    tools = [] if body.get("tool_choice") == "none" else list_of(body, "tools")
    if odd := [tool.get("type") for tool in tools if tool.get("type") != "function"]:
        raise BadRequest(f"a tool is of type {odd[0]!r}; only functions are supported")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(body, "input")
    history = [one for one in before if one["role"] != "system" or not body.get("instructions")]
    system: list[Message] = (
        [{"role": "system", "content": str(body["instructions"])}] if body.get("instructions") else []
    )
    return Asked(
        messages=(*system, *history, *_messages(items)),
        tools=tuple({"type": "function", "function": _function(tool)} for tool in tools),
        max_tokens=limit_of(body.get("max_output_tokens")),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or "policy"),
        forced=forced_of(body.get("tool_choice")),
        schema=schema_of((body.get("text") or {}).get("format")),
    )


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert items to messages: calls belong to the turn that they follow."""
    found: list[Message] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message":
            role = str(item.get("role"))
            if role not in ("system", "developer", "user", "assistant"):
                raise BadRequest(f"an item has the role {role!r}")
            found.append({"role": "system" if role == "developer" else role, "content": text_of(item.get("content"))})
        elif kind == "function_call":
            call = (str(item.get("call_id")), str(item.get("name")), arguments_of(item.get("arguments")))
            asked = assistant("", [call])
            if found and "tool_calls" in found[-1]:
                found[-1]["tool_calls"].extend(asked["tool_calls"])
            elif found and found[-1]["role"] == "assistant":
                found[-1] = {**asked, "content": found[-1]["content"]}
            else:
                found.append(asked)
        elif kind == "function_call_output":
            output = text_of(item.get("output"))
            found.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id"))})
        elif kind != "reasoning":
            raise BadRequest(f"an item is of type {kind!r}")
    return found


def answer(turn: AssistantTurn) -> dict[str, Any]:
    """Return the document of a turn."""
    cut = turn.finish_reason == "length"
    return _envelope(turn) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [item for _, item in _output(turn)],
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.tokens,
        },
    }


def events(turn: AssistantTurn) -> Iterator[Event]:
    """Yield the answer as a stream, in as few events as clients need."""
    for number, (name, data) in enumerate(_events(turn)):
        yield name, {"type": name, "sequence_number": number} | data


def _events(turn: AssistantTurn) -> Iterator[Event]:
    begun = _envelope(turn) | {"status": "in_progress", "output": []}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, (call, item) in enumerate(_output(turn)):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if call is None else {"arguments": ""}
        yield "response.output_item.added", {"output_index": index, "item": item | empty | {"status": "in_progress"}}
        yield from _text_events(turn, place) if call is None else _call_events(call, place)
        yield "response.output_item.done", {"output_index": index, "item": item}
    whole = answer(turn)
    yield f"response.{whole['status']}", {"response": whole}


def _text_events(turn: AssistantTurn, place: dict[str, Any]) -> Iterator[Event]:
    place = place | {"content_index": 0}
    part = {"type": "output_text", "text": turn.content, "annotations": []}
    yield "response.content_part.added", place | {"part": part | {"text": ""}}
    yield "response.output_text.delta", place | {"delta": turn.content, "logprobs": []}
    yield "response.output_text.done", place | {"text": turn.content, "logprobs": []}
    yield "response.content_part.done", place | {"part": part}


def _call_events(call: AssistantCall, place: dict[str, Any]) -> Iterator[Event]:
    yield "response.function_call_arguments.delta", place | {"delta": call.json}
    yield "response.function_call_arguments.done", place | {"arguments": call.json, "name": call.name}


def _output(turn: AssistantTurn) -> Iterator[tuple[AssistantCall | None, dict[str, Any]]]:
    """Yield the text, unless it is empty and there are calls; then the calls."""
    if turn.content or not turn.calls:
        part = {"type": "output_text", "text": turn.content, "annotations": []}
        item = {
            "id": f"msg_{turn.id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        yield None, item
    for index, call in enumerate(turn.calls):
        yield (
            call,
            {
                "id": f"fc_{turn.id}_{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.json,
            },
        )


def _envelope(turn: AssistantTurn) -> dict[str, Any]:
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": turn.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
    }
