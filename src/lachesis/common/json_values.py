"""Of what kind a parsed JSON value is, as type checkers understand it: ``isinstance`` does not say what it holds."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is an object, whose keys are text in JSON."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list of whatever."""
    return isinstance(value, list)


def is_array(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether it is an array of whatever: a list, or a tuple where Python wrote it."""
    return isinstance(value, list | tuple)
