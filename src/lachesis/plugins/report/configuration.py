"""Configuration as the report shows it: its lines with their keys, and the keys that a sentence names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import yaml

_DOTTED = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)")


def key_lines(text: str) -> list[tuple[str, str]]:
    """Return each line of a YAML text, and the dotted key that begins in it, or ""."""
    root = yaml.compose(text)
    keys: dict[int, str] = {}
    for line, key in _keys(root, ""):
        keys.setdefault(line, key)
    return [(line, keys.get(number, "")) for number, line in enumerate(text.splitlines())]


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[int, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield key.start_mark.line, name
        yield from _keys(value, f"{name}.")


def key_parts(sentence: str, keys: Collection[str]) -> list[tuple[str, str]]:
    """Split a sentence into parts: the text of each, and the key that it names, or ""."""
    parts = ((part, part if part in keys else "") for part in _DOTTED.split(sentence))
    return [(text, key) for text, key in parts if text]
