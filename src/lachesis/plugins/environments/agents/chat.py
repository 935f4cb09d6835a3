"""OpenAI's Chat Completions: parses bodies to requests, and formats turns as answers. Pure."""

from __future__ import annotations

import time
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
    stops_of,
    text_of,
)


def read(body: Mapping[str, Any]) -> Asked:
    """Parse a body. Sampling parameters are the run's, so the agent's temperature is ignored.

    Raises:
        BadRequest: it is malformed, or asks for several choices, or for an output by a schema.
    """
    if body.get("n") not in (None, 1):
        raise BadRequest("n is not 1: a turn of a rollout has one completion")
    form = body.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise BadRequest("response_format is not text: nothing holds the model to a format")
    tools = [] if body.get("tool_choice") == "none" else list_of(body, "tools")
    if any(tool.get("type") != "function" for tool in tools):
        raise BadRequest("a tool is not a function")
    return Asked(
        messages=tuple(message(one) for one in list_of(body, "messages")),
        tools=tuple(tools),
        max_tokens=limit_of(body.get("max_completion_tokens") or body.get("max_tokens")),
        stop=stops_of(body.get("stop")),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or "policy"),
    )


def message(one: Mapping[str, Any]) -> Message:
    """Convert a message to the format of chat templates. Raises BadRequest."""
    role = one.get("role")
    content = text_of(one.get("content"))
    if role == "assistant":
        calls = [
            (str(call.get("id")), str(call["function"]["name"]), arguments_of(call["function"].get("arguments")))
            for call in one.get("tool_calls") or []
        ]
        return assistant(content, calls)
    if role in ("tool", "function"):
        return {"role": "tool", "content": content, "tool_call_id": str(one.get("tool_call_id", ""))}
    if role in ("system", "developer", "user"):
        return {"role": "system" if role == "developer" else role, "content": content}
    raise BadRequest(f"a message has the role {role!r}")


def answer(turn: AssistantTurn) -> dict[str, Any]:
    """Return the document of a turn."""
    said: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}
            for call in turn.calls
        ]
    choice = {"index": 0, "message": said, "finish_reason": _reason(turn), "logprobs": None}
    return _envelope(turn, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}


def events(turn: AssistantTurn) -> Iterator[Event]:
    """Yield the answer as a stream, in as few events as clients need."""

    def chunk(delta: dict[str, Any], reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return "", _envelope(turn, "chat.completion.chunk") | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if turn.content:
        yield chunk({"content": turn.content})
    for index, call in enumerate(turn.calls):
        function = {"name": call.name, "arguments": call.json}
        yield chunk({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
    yield chunk({}, _reason(turn))
    yield "", _envelope(turn, "chat.completion.chunk") | {"choices": [], "usage": _usage(turn)}


def _reason(turn: AssistantTurn) -> str:
    return "tool_calls" if turn.calls else turn.finish_reason


def _envelope(turn: AssistantTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": int(time.time()), "model": turn.model}


def _usage(turn: AssistantTurn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.tokens,
        "total_tokens": turn.prompt_tokens + turn.tokens,
    }
