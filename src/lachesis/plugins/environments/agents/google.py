"""Google's generateContent: parses bodies to requests, and formats turns as answers. Pure."""

from __future__ import annotations

import json
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
    limit_of,
    list_of,
    stops_of,
)


def read(body: Mapping[str, Any], *, model: str, stream: bool) -> Asked:
    """Parse a body. Sampling parameters are the run's, so the agent's temperature is ignored.

    Raises:
        BadRequest: it is malformed, or asks for a tool that Google runs.
    """
    options = body.get("generationConfig") or {}
    choice = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    tools = [] if choice.get("mode") == "NONE" else [_function(one) for one in _declared(list_of(body, "tools"))]
    named = set(choice.get("allowedFunctionNames") or ())
    if named:
        tools = [tool for tool in tools if tool["function"]["name"] in named]
    found = body.get("systemInstruction")
    system: list[Message] = [{"role": "system", "content": _text(_parts(found))}] if found else []
    schema = options.get("responseJsonSchema") or options.get("responseSchema") or {}
    return Asked(
        messages=(*system, *(message for one in list_of(body, "contents") for message in _messages(one))),
        tools=tuple(tools),
        max_tokens=limit_of(options.get("maxOutputTokens")),
        stop=stops_of(options.get("stopSequences")),
        stream=stream,
        model=model.removeprefix("models/") or "policy",
        forced="" if choice.get("mode") == "ANY" else None,
        schema=_lowered(schema) if options.get("responseMimeType") == "application/json" else None,
        n=1 if (n := options.get("candidateCount")) is None else n,
    )


def _declared(tools: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for tool in tools:
        if odd := [name for name, value in tool.items() if name != "functionDeclarations" and value is not None]:
            raise BadRequest(f"a tool is of type {odd[0]!r}; only functions are supported")
        yield from list_of(tool, "functionDeclarations")


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": tool["description"]} if tool.get("description") else {}
    parameters = tool.get("parametersJsonSchema") or _lowered(tool.get("parameters") or {})
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": parameters}}


def _lowered(schema: Any) -> Any:
    """Return a schema with JSON's names of types: Google's own are in capitals."""
    if isinstance(schema, dict):
        return {
            name: value.lower() if name == "type" and isinstance(value, str) else _lowered(value)
            for name, value in schema.items()
        }
    return [_lowered(one) for one in schema] if isinstance(schema, list) else schema


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"text": content}]
    return [part for part in list_of(content, "parts") if not part.get("thought")]


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    if odd := [part for part in parts if not isinstance(part.get("text"), str)]:
        raise BadRequest(f"a part of a content has {sorted(odd[0])}; this model reads only text")
    return "\n".join(part["text"] for part in parts)


def _messages(one: Mapping[str, Any]) -> Iterator[Message]:
    """Yield a content as messages of chat templates: answers of tools are separate messages, before its other parts."""
    role, parts = one.get("role") or "user", _parts(one)
    if role not in ("user", "model", "function"):
        raise BadRequest(f"a content has the role {role!r}")
    texts = [part for part in parts if "functionCall" not in part and "functionResponse" not in part]
    if role == "model":
        used = [part["functionCall"] for part in parts if "functionCall" in part]
        calls = [(str(call.get("id") or call["name"]), str(call["name"]), arguments_of(call.get("args") or {}))
                 for call in used]  # fmt: skip
        yield assistant(_text(texts), calls)
        return
    for part in parts:
        if (told := part.get("functionResponse")) is not None:
            yield {"role": "tool", "content": _result(told.get("response")),
                   "tool_call_id": str(told.get("id") or told["name"])}  # fmt: skip
    if texts:
        yield {"role": "user", "content": _text(texts)}


def _result(response: Any) -> str:
    """Return a tool's answer, without the client's wrapping of a text."""
    if isinstance(response, dict) and len(response) == 1 and isinstance(text := next(iter(response.values())), str):
        return text
    return json.dumps(response, ensure_ascii=False)


def answer(*turns: AssistantTurn) -> dict[str, Any]:
    """Return the document of a turn, or of several to choose from."""
    prompt, tokens = turns[0].prompt_tokens, sum(turn.tokens for turn in turns)
    return {
        "candidates": [
            {
                "index": index,
                "content": {"role": "model", "parts": _said(turn)},
                "finishReason": "MAX_TOKENS" if turn.finish_reason == "length" else "STOP",
            }
            for index, turn in enumerate(turns)
        ],
        "usageMetadata": {
            "promptTokenCount": prompt,
            "candidatesTokenCount": tokens,
            "totalTokenCount": prompt + tokens,
        },
        "modelVersion": turns[0].model,
        "responseId": turns[0].id,
    }


def events(*turns: AssistantTurn) -> Iterator[Event]:
    """Yield the answer as a stream of one event."""
    yield "", answer(*turns)


def _said(turn: AssistantTurn) -> list[dict[str, Any]]:
    text = [{"text": turn.content}] if turn.content or not turn.calls else []
    return [
        *text,
        *({"functionCall": {"id": call.id, "name": call.name, "args": dict(call.arguments)}} for call in turn.calls),
    ]
