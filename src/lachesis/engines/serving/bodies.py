"""Parsing of JSON requests: fields are typed, and the error for an unknown field names the closest one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError
from pydantic_core import ErrorDetails, from_json

from lachesis.common.errors import EngineError, LachesisError, did_you_mean
from lachesis.common.json_values import is_object


class Refused(EngineError):
    """The error for an invalid request. The engine continues as before.

    ``status`` is the HTTP status: 400 malformed, 401 no token, 403 not allowed there, 404 unknown name,
    409 not in this state, 413 too large, 422 well-formed but it does not fit this model.
    """

    def __init__(self, message: str, *, status: int = 400, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class Request(BaseModel):
    """The fields of a body. ``aliases`` are other names of fields; ``also`` are names that are accepted and ignored."""

    model_config = ConfigDict(frozen=True)
    aliases: ClassVar[Mapping[str, str]] = {}
    also: ClassVar[Collection[str]] = ()


R = TypeVar("R", bound=Request)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("Input should be a string without NUL")
    return text


# JSON scalars are not converted: neither "2" nor true is a number.
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
Whole = Annotated[int, Strict()]
Count = Annotated[Whole, Field(ge=0)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
TokenIds = Annotated[tuple[Count, ...], Field(fail_fast=True)]
# Validator for a list of texts: a single text may stand without a list.
SINGLE = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object in a body; an empty body is an empty object.

    Raises:
        Refused: (400) it is not UTF-8, not JSON, has NaN or Infinity, or is not an object.
    """
    if not raw.strip():
        return {}
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(
            f"the body is not JSON: {error}", remedy="send a JSON object in UTF-8, with finite numbers"
        ) from error
    if not is_object(document):
        raise Refused(f"the body is {_named(document)}, not a JSON object", remedy="send an object with named fields")
    return document


def given(document: Mapping[str, Any], names: Collection[str], *, where: str = "") -> dict[str, Any]:
    """Return the fields that an object sets; null counts as absent.

    Args:
        document: the object.
        names: allowed names.
        where: its place in messages, as in "lora"; empty for the body itself.

    Raises:
        Refused: (400) it has another name.
    """
    for name in document:
        if name not in names:
            hint = did_you_mean(name, sorted(names), otherwise=f"known fields: {', '.join(sorted(names)) or 'none'}")
            raise Refused(f"unknown field {f'{where}.{name}'.lstrip('.')!r}", remedy=hint)
    return {name: value for name, value in document.items() if value is not None}


def parse(kind: type[R], document: Mapping[str, Any], *, where: str = "", context: Any = None) -> R:
    """Parse a JSON object into a request; ``where`` names it in messages, ``context`` is for validators.

    Raises:
        Refused: (400) a field is unknown, missing, of the wrong type or out of range; also whatever validators raise.
    """
    fields = given(document, {*kind.model_fields, *kind.aliases, *kind.also}, where=where)
    for alias, name in kind.aliases.items():
        value = fields.pop(alias, None)
        if value is not None and name in fields and kind.model_fields[name].is_required():
            raise Refused(f"the body has both {name} and {alias}", remedy="send one of them")
        if value is not None:
            fields.setdefault(name, value)
    try:
        return kind.model_validate(fields, context=context)
    except ValidationError as error:
        remedy = "add it to the body" if error.errors()[0]["type"] == "missing" else "correct the field"
        raise Refused(fault_of(error, where=where), remedy=remedy) from error


def fault_of(error: ValidationError, *, where: str = "") -> str:
    """Describe the first invalid field."""
    fault: ErrorDetails = error.errors(include_url=False)[0]
    # Skip names that are not in the body: the field that collects sampling fields, and the tags of unions.
    parts = [str(part) for part in (where, *fault["loc"]) if part not in ("", "sampling") and "[" not in str(part)]
    name = ".".join(parts)
    if fault["type"] == "missing":
        return f"the field {name!r} is missing"
    wanted = fault["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    return f"the field {name!r} is {_named(fault['input'])}: {wanted}"


def error_document(error: LachesisError) -> dict[str, Any]:
    """Return an error as the JSON object of an answer."""
    kind = "EngineError" if isinstance(error, Refused) else type(error).__name__
    return {"error": {"type": kind, "message": error.message, "remedy": error.remedy}}


def _named(value: Any) -> str:
    """Return a value as short JSON for a message."""
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
