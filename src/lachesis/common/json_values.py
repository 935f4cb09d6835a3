"""JSON: what others wrote, of what kind a parsed value is for type checkers, and a document as bytes on one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from pydantic_core import PydanticSerializationError, to_json

DEEPEST = 100
"""How deep a value may be nested that others wrote. Whoever copies, renders or writes one goes as deep in calls."""
_TOO_DEEP = f"it is nested more than {DEEPEST} deep"


def read_json(text: str | bytes) -> Any:
    """What somebody wrote as JSON who may write anything, as a model does.

    Raises:
        ValueError: it is none, or is nested too deeply to be handed on.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a client sends.

    Raises:
        ValueError: it is none, is nested too deeply, or has text that UTF-8 cannot hold, and no answer could repeat.
    """
    value = read_json(body)
    if not is_object(value):
        raise ValueError("it is no object")
    if b"\\u" in body:
        try:
            to_json(value)
        except PydanticSerializationError as error:
            raise ValueError("a text in it has half a surrogate pair") from error
    return value


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return False
    return True


def _inside(value: object) -> Iterable[Any]:
    return value.values() if is_object(value) else value if is_list(value) else ()


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """On one line. Rollouts have a number for each token, which the standard library takes long over."""
    try:
        return to_json(document)
    except PydanticSerializationError:  # half a surrogate pair in a text, which UTF-8 cannot hold
        return json.dumps(document).encode()


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is an object, whose keys are text in JSON."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list of whatever."""
    return isinstance(value, list)


def is_array(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether it is an array of whatever: a list, or a tuple where Python wrote it."""
    return isinstance(value, list | tuple)


def own(value: Any) -> Any:
    """The value in lists and mappings of its own, at any depth: whoever gets it may change it."""
    if isinstance(value, dict):  # most entries of messages are texts, and all rollouts' messages come here
        copy = dict(value)
        for name, entry in value.items():
            if type(entry) is not str:
                copy[name] = own(entry)
        return copy
    if isinstance(value, list):
        return [entry if type(entry) is str else own(entry) for entry in value]
    return value
