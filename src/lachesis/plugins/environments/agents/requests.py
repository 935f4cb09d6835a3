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

_MOST_ANSWERS = 16
# More than any API takes; an engine would refuse an empty one, which would end the run.
_MOST_STOPS, _LONGEST_STOP = 64, 1000


class BadRequest(LachesisError):
    """Error for a request that cannot be served; ``status`` and ``code`` are those of OpenAI's API."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Asked:
    """An agent's request for a turn.

    ``messages`` and ``tools`` are in the format of chat templates: contents are texts, arguments of calls mappings.
    ``forced`` is the tool that must be called, empty for any; ``schema`` is the answer's JSON schema, empty for any
    object; ``n`` is the number of answers.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    model: str = "policy"
    forced: str | None = None
    schema: Mapping[str, Any] | None = None
    n: int = 1

    def __post_init__(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools]
        if self.forced is not None and (not names or (self.forced and self.forced not in names)):
            raise BadRequest(f"the tool that has to be called ({self.forced or 'any'}) is not among the tools")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or not 1 <= self.n <= _MOST_ANSWERS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"n is {self.n!r}, not a number of answers from 1 to {_MOST_ANSWERS}")


@dataclass(frozen=True, slots=True)
class AssistantCall:
    """A call of a tool in a turn."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        """Return the arguments as JSON text, as all APIs except Anthropic's have them."""
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
"""Event of a stream: its name, and its data."""

Dialect = Literal["chat", "responses", "messages", "google"]


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
            raise BadRequest(f"a part of a content is of type {kind!r}; this model reads only text")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "\n".join(texts)


def schema_of(form: object) -> Mapping[str, Any] | None:
    """Return the schema of OpenAI's format of an answer: None for text. Raises BadRequest."""
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "json_object":
        return {}
    schema = form.get("json_schema", form).get("schema") if isinstance(form, dict) and kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise BadRequest(f"the format {kind!r} is neither text, json_object nor json_schema with a schema")
    return schema


def forced_of(choice: object) -> str | None:
    """Return the tool that OpenAI's ``tool_choice`` asks for: empty for any, None for a free choice.

    Raises:
        BadRequest: any other choice.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return str(choice.get("function", choice)["name"])
    raise BadRequest(f"tool_choice {choice!r} is neither none, auto, required nor a function")


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
    """Return the strings that end a turn. Raises BadRequest."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise BadRequest("stop is neither a string nor a list of strings")
    if len(found) > _MOST_STOPS or not all(1 <= len(one) <= _LONGEST_STOP for one in found):
        raise BadRequest(f"stop has over {_MOST_STOPS} strings, an empty one, or one over {_LONGEST_STOP} characters")
    return tuple(found)
