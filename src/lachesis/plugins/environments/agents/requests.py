"""Common records of the model APIs: a request for a turn, and the turn. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lachesis.common.errors import LachesisError
from lachesis.common.json_values import read_json
from lachesis.common.types import FinishReason, Message


class BadRequest(LachesisError):
    """A request that cannot be served; ``status`` and ``code`` are those of OpenAI's API."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn that an agent asks for.

    ``messages`` and ``tools`` are in the format of chat templates: contents are texts, arguments of calls mappings.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    model: str = "policy"


@dataclass(frozen=True, slots=True)
class AssistantCall:
    """A call of a tool in a turn."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        """Arguments as JSON text, as all APIs except Anthropic's have them."""
        return json.dumps(dict(self.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """The model's turn, with the numbers of its tokens."""

    content: str
    calls: tuple[AssistantCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: int
    model: str = "policy"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


Event = tuple[str, dict[str, Any]]
"""One event of a stream: its name, and its data."""

Dialect = Literal["chat", "responses", "messages"]


def text_of(content: object, *, kinds: Sequence[str] = ("text", "input_text", "output_text", "refusal")) -> str:
    """Return the text of a content: a string, or parts of text. Raises BadRequest for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"a content is {type(content).__name__}, neither text nor a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise BadRequest(f"a part of a content is of type {kind!r}; this model reads text only")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "\n".join(texts)


def arguments_of(value: object) -> Mapping[str, Any]:
    """Parse the arguments of a call that an agent sends back. Raises BadRequest if they are not an object."""
    if isinstance(value, str):
        try:
            value = read_json(value or "{}")
        except ValueError as error:
            raise BadRequest(f"the arguments of a call are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the arguments of a call are not an object")
    return value


def assistant(content: str, calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Message:
    """Return a turn of the model in the format of chat templates; ``calls`` are ids, names and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for number, name, arguments in calls
        ]
    return message


def limit_of(value: object) -> int | None:
    """Return a number of tokens. Raises BadRequest if it is invalid."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{value!r} is not a number of tokens")
    return value


def list_of(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that holds objects; empty if it is missing. Raises BadRequest."""
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadRequest(f"{name} is not a list of objects")
    return found


def stops_of(value: object) -> tuple[str, ...]:
    """Strings that end a turn. Raises BadRequest."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise BadRequest("stop is neither a text nor a list of texts")
    return tuple(found)
