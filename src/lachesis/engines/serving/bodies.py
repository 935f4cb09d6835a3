"""Reading the JSON of a request: every field has a type, an unknown one is an error that names its neighbour."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from lachesis.engines.serving.served import Refused

_MISSING = object()


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; an empty body is an empty object.

    Raises:
        Refused: (400) it is not UTF-8, not JSON, has NaN or Infinity, or is something else than an object.
    """
    if not raw.strip():
        return {}
    try:
        document = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise Refused(f"the body is not UTF-8: byte {error.start}", remedy="send JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Refused(f"the body is not JSON: {error.msg} at {where}", remedy="send a JSON object") from error
    except (RecursionError, ValueError) as error:
        raise Refused("the body is nested too deeply or has a number too long", remedy="send plain JSON") from error
    if not isinstance(document, dict):
        raise Refused(f"the body is {_named(document)}, not a JSON object", remedy="send an object of named fields")
    return document


class Body:
    """The fields of a JSON object. Reading one checks its type; an absent or null field gives the default.

    Args:
        document: the object.
        known: the names it may have.
        where: what the object is in messages, as in "lora"; empty for the body itself.

    Raises:
        Refused: (400) it has a name that is not known.
    """

    def __init__(self, document: Mapping[str, Any], *, known: Iterable[str], where: str = "") -> None:
        self._document = document
        self._where = f"{where}." if where else ""
        names = sorted(known)
        for name in document:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names) or 'none'}"
                raise Refused(f"unknown field {self._where + name!r}", remedy=hint)

    def get(self, name: str) -> Any:
        """The raw value, ``None`` where absent."""
        return self._document.get(name)

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """A string that is not empty."""
        value = self._value(name, default)
        if value is not default and (not isinstance(value, str) or not value or "\0" in value):
            self._refuse(name, value, "a string that is not empty")
        return value

    def integer(self, name: str, default: Any = _MISSING, *, low: int | None = None, high: int | None = None) -> Any:
        """A whole number from ``low`` to ``high``."""
        value = self._value(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(name, value, "a whole number")
        if (low is not None and value < low) or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
            self._refuse(name, value, f"a whole number, {limits}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A finite number."""
        value = self._value(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            self._refuse(name, value, "a number")
        return value

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        """True or false."""
        value = self._value(name, default)
        if value is not default and not isinstance(value, bool):
            self._refuse(name, value, "true or false")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: Any = _MISSING) -> Any:
        """One of some words."""
        value = self._value(name, default)
        if value is not default and (not isinstance(value, str) or value not in choices):
            self._refuse(name, value, f"one of {', '.join(choices)}")
        return value

    def integers(self, name: str, default: Any = _MISSING) -> Any:
        """A list of whole numbers of 0 and above, as a tuple."""
        value = self._value(name, default)
        if value is default:
            return value
        # The type itself, for a boolean is an int too; token ids are many, so no call for each.
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            self._refuse(name, value, "a list of whole numbers of 0 and above")
        return tuple(value)

    def texts(self, name: str, default: Any = _MISSING) -> Any:
        """A list of strings that are not empty, as a tuple; a single string is a list of one."""
        value = self._value(name, default)
        if value is default:
            return value
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            self._refuse(name, value, "a list of strings that are not empty")
        return tuple(items)

    def sequence(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._value(name, _MISSING)
        if not isinstance(value, list):
            self._refuse(name, value, "a list")
        return value

    def mapping(self, name: str, default: Any = _MISSING) -> Any:
        """An object of its own."""
        value = self._value(name, default)
        if value is not default and not isinstance(value, dict):
            self._refuse(name, value, "an object")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self._document.get(name)
        if value is None:
            if default is _MISSING:
                raise Refused(f"the field {self._where + name!r} is missing", remedy="add it to the body")
            return default
        return value

    def _refuse(self, name: str, value: Any, wanted: str) -> NoReturn:
        raise Refused(f"the field {self._where + name!r} is {_named(value)}, not {wanted}", remedy="correct the field")


def _named(value: Any) -> str:
    """A value in a message: short, and as JSON has it."""
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise Refused(f"the body has {name}, which is not JSON", remedy="send finite numbers")
