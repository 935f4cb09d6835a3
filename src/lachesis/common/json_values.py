"""JSON: of what kind a parsed value is, as type checkers understand it, and a document as bytes on one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from pydantic_core import PydanticSerializationError, to_json


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
