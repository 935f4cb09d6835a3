"""OpenAI's Chat Completions: parses bodies to requests, and formats turns as answers. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lachesis.common.types import Message
from lachesis.plugins.environments.agents.requests import (
    Asked,
    AssistantTurn,
    BadRequest,
    Event,
    arguments_of,
    assistant,
    forced_of,
    limit_of,
    list_of,
    schema_of,
    stops_of,
    text_of,
)


def read(body: Mapping[str, Any]) -> Asked:
    """Parse a body. Sampling parameters are the run's, so the agent's temperature is ignored.

    Raises:
        BadRequest: it is malformed.
    """
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
        forced=forced_of(body.get("tool_choice")),
        schema=schema_of(body.get("response_format")),
        n=1 if (n := body.get("n")) is None else n,
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


def answer(*turns: AssistantTurn) -> dict[str, Any]:
    """Return the document of a turn, or of several to choose from."""
    choices = [_choice(index, turn) for index, turn in enumerate(turns)]
    return _envelope(turns[0], "chat.completion") | {"choices": choices, "usage": _usage(turns)}


def _choice(index: int, turn: AssistantTurn) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}
            for call in turn.calls
        ]
    return {"index": index, "message": said, "finish_reason": _reason(turn), "logprobs": None}


def events(*turns: AssistantTurn) -> Iterator[Event]:
    """Yield the answer as a stream, in as few events as clients need."""
    for index, turn in enumerate(turns):
        yield from _events(index, turn)
    yield "", _envelope(turns[0], "chat.completion.chunk") | {"choices": [], "usage": _usage(turns)}


def _events(place: int, turn: AssistantTurn) -> Iterator[Event]:
    def chunk(delta: dict[str, Any], reason: str | None = None) -> Event:
        choice = {"index": place, "delta": delta, "finish_reason": reason, "logprobs": None}
        return "", _envelope(turn, "chat.completion.chunk") | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if turn.content:
        yield chunk({"content": turn.content})
    for index, call in enumerate(turn.calls):
        function = {"name": call.name, "arguments": call.json}
        yield chunk({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
    yield chunk({}, _reason(turn))


def _reason(turn: AssistantTurn) -> str:
    return "tool_calls" if turn.calls else turn.finish_reason


def _envelope(turn: AssistantTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": int(time.time()), "model": turn.model}


def _usage(turns: Sequence[AssistantTurn]) -> dict[str, int]:
    prompt, tokens = turns[0].prompt_tokens, sum(turn.tokens for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
