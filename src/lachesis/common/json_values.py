"""JSON: reading untrusted text, type guards for parsed values, and documents as bytes on one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from pydantic_core import PydanticSerializationError, to_json

DEEPEST = 100
"""The deepest nesting of untrusted values: code that copies, renders or writes them recurses as deeply."""
_TOO_DEEP = f"it is nested more than {DEEPEST} deep"


def read_json(text: str | bytes) -> Any:
    """Parse untrusted JSON, such as a model's.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def read_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object that a client sent.

    Raises:
        ValueError: the body is not an object, is nested too deeply, or has text that UTF-8 cannot encode.
    """
    value = read_json(body)
    if not is_object(value):
        raise ValueError("it is not an object")
    if b"\\u" in body:
        try:
            to_json(value)
        except PydanticSerializationError as error:
            raise ValueError("a text in it has half a surrogate pair") from error
    return value


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level for inner in _inside(one) if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def _inside(value: object) -> Iterable[Any]:
    return value.values() if is_object(value) else value if is_list(value) else ()


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON on one line, faster than the standard library on a rollout's many numbers."""
    try:
        return to_json(document)
    except PydanticSerializationError:  # half a surrogate pair in a text, which UTF-8 cannot encode
        return json.dumps(document).encode()


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return True if ``value`` is an object, whose keys are text in JSON."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return True if ``value`` is a list."""
    return isinstance(value, list)


def is_array(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return True if ``value`` is an array: a list, or a tuple that Python code made."""
    return isinstance(value, list | tuple)


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf; an empty mapping is one."""
    for key, value in tree.items():
        if is_object(value) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def own(value: Any) -> Any:
    """Return a copy of ``value`` with new lists and mappings at every depth, which the caller may modify."""
    if isinstance(value, dict):  # most entries of messages are strings, and this copies all rollouts' messages
        copy = dict(value)
        for name, entry in value.items():
            if type(entry) is not str:
                copy[name] = own(entry)
        return copy
    if isinstance(value, list):
        return [entry if type(entry) is str else own(entry) for entry in value]
    return value
