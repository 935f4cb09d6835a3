"""Hydra's command line and OmegaConf's ``${...}``, as in verl's scripts and files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_list, is_object
from lachesis.config.document import parse_document

# ``a.b=c``, also with ``+``, ``++`` or ``~`` before it, and ``group@package=choice``.
ASSIGNMENT = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w/]*(?:[.@][\w]+)*)=(.*)", re.DOTALL)
DELETION = re.compile(r"~([A-Za-z_]\w*(?:\.\w+)*)")
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_MOST_REFERENCES = 50


def parse_value(text: str) -> Any:
    """Return the value of an override: ``True`` is a switch, ``[a,b]`` a list, ``{a:1}`` a mapping."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    # Hydra needs no space after a mapping's colon.
    spaced = re.sub(r":(?![\s/\\])", ": ", text) if text.startswith("{") else text
    try:
        return parse_document(f"value: {spaced}", name="value").data["value"]
    except ConfigError:
        return text


def resolved(data: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data`` with ``${a.b}``, ``${oc.env:NAME,default}`` and ``${oc.select:a.b,default}`` replaced.

    References to names that are not in ``names``, flat and dotted, stay unchanged.
    """
    return {key: _resolved(value, names) for key, value in data.items()}


def _resolved(value: Any, names: Mapping[str, Any]) -> Any:
    if is_object(value):
        return resolved(value, names)
    if is_list(value):
        return [_resolved(one, names) for one in value]
    for _ in range(_MOST_REFERENCES):
        match = _REFERENCE.search(value) if isinstance(value, str) else None
        found = None if match is None else _referred(match[1], names)
        if match is None or found is None:
            return value
        value = found if match[0] == value else f"{value[: match.start()]}{found}{value[match.end() :]}"
    return value


def _referred(inner: str, names: Mapping[str, Any]) -> Any:
    function, colon, rest = inner.partition(":")
    name, comma, default = (rest if colon else inner).partition(",")
    source: Mapping[str, Any] = os.environ if function == "oc.env" else names
    found = source.get(name.strip()) if not colon or function in ("oc.env", "oc.select") else None
    return parse_value(default.strip()) if found is None and comma else found
