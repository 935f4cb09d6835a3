"""A YAML file as data, with the place of every value, and the way back to text.

Scalars are read by the rules of YAML 1.2: ``on``, ``no`` and dates are text, ``1e-6`` is a number. ``<<`` merges the
keys of another mapping, which YAML 1.2 dropped and everybody's files still use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_list, is_object

Place = tuple[str | int, ...]

# Of a configuration with its aliases written out; a few lines of aliases of aliases could stand for billions.
_MOST_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")


class _Loader(yaml.SafeLoader):
    """A loader that composes nodes whose scalars are tagged by the core schema of YAML 1.2."""


# What pyright is told to ignore here is what the stubs of PyYAML leave without types.
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _pattern, _first)  # pyright: ignore[reportUnknownMemberType]


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text that YAML 1.1 or 1.2 would read as something else, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    f"{_TAG}float", _FLOAT, list("-+.0123456789")
)


# What the errors call keys that are in no file.
FROM_PYTHON = "the keys given from Python"


@dataclass(slots=True)
class Document:
    """The data of a file, the place of each value (``line 7``, ``--set a.b``), and the problems found.

    ``problems`` has a line for each problem that shows without the schema; ``repeated`` one for each key that is
    written twice, of which the last counts. ``spelled`` returns how the file's own dialect writes a canonical key that
    is not in the file; unset means that the file is in our keys.
    """

    name: str
    data: dict[str, Any]
    origins: dict[Place, str] = field(default_factory=dict[Place, str])
    problems: list[str] = field(default_factory=list[str])
    repeated: list[str] = field(default_factory=list[str])
    spelled: Callable[[str], str | None] = lambda path: None

    def at(self, place: Place) -> str:
        """Return `` (line 7)`` for the value at ``place``, or for the nearest section around it that was written."""
        for length in range(len(place), 0, -1):
            if place[:length] in self.origins:
                return f" ({self.origins[place[:length]]})"
        return ""

    def setting(self, key: str, value: str) -> str:
        """Return how the user gives a value: ``--set run.steps=10``, or an argument in Python, ``run.steps=10``."""
        if self.name != FROM_PYTHON:
            return f"--set {key}={value}"
        return f"{key}={value}" if "." not in key else f'"{key}": {value}'


def dotted(place: Place) -> str:
    """Return a place as text: ``rewards.weights[1]`` for ``("rewards", "weights", 1)``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: the file is missing, unreadable, empty, not YAML, or not a mapping of keys.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {path}", remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}", remedy="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="give a readable file") from error
    return parse_document(text, name=str(path))


def parse_document(text: str, *, name: str) -> Document:
    """Parse YAML text, which errors call ``name``; raise as :func:`read_document` does."""
    node = _compose(text, name=name)
    if node is None:
        raise ConfigError(
            f"{name} is empty", remedy="write at least run.steps, model.path, data.path and rewards.functions"
        )
    document = Document(name=name, data={})
    data = _Reader(document).build(node, place=(), inside=())
    if not isinstance(data, dict):
        raise ConfigError(
            f"{name} (line {node.start_mark.line + 1}): expected a mapping of sections, got {describe(data)}",
            remedy="write `section:` and below it, indented, `key: value`",
        )
    document.data = data
    return document


def apply_overrides(document: Document, overrides: Sequence[str], *, row_sections: Collection[str] = ()) -> None:
    """Write each ``a.b=c`` into the document; ``c`` is YAML and later ones win.

    An item of a list is ``a[0]`` or ``a.0``; the index after the last makes the list longer. If a list has one
    mapping, ``a.b`` is a key of that. Unreadable overrides are added to ``document.problems``. The schema checks later
    that the keys exist.

    Args:
        row_sections: keys that are lists of mappings, even if the file does not have them yet.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or (written := _parts(path.strip())) is None:
            document.problems.append(f"--set {override}: expected section.key=value")
            continue
        parts = _into_rows(document, written, row_sections)
        try:
            node = _compose(text, name=f"--set {override}")
        except ConfigError as error:
            document.problems.append(error.message)
            continue
        if not _reachable(document, parts, path.strip()):
            continue
        _forget(document, parts)
        document.origins[parts] = f"--set {path.strip()}"
        value = None if node is None else _Reader(document, lines=False).build(node, place=parts, inside=())
        _assign(document, parts, value)


def to_yaml(data: Any) -> str:
    """Return YAML text that :func:`parse_document` reads back equal, with keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def describe(value: Any) -> str:
    """Describe a value for an error message: text in quotes, collections by name, at most a line."""
    text = _short(repr(value))
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {text}"
        case dict():
            return f"a mapping {text}"
        case list():
            return f"a list {text}"
        case _:
            return f"the number {value!r}"


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _compose(text: str, *, name: str) -> Node | None:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and _written_out(node, {}) > _MOST_VALUES:
            raise ConfigError(
                f"{name}: its aliases (*name) stand for more than {_MOST_VALUES:,} values",
                remedy="write the values out, or use fewer aliases of aliases",
            )
        return node
    except RecursionError as error:
        raise ConfigError(
            f"{name}: it is nested too deeply", remedy="give a configuration of sections and keys"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{name}{place}: not valid YAML: {reason}", remedy="correct this line") from error
    except yaml.YAMLError as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"{name}: not valid YAML: {reason}", remedy="remove the character") from error
    finally:
        if loader is not None:
            loader.dispose()  # pyright: ignore[reportUnknownMemberType]


def _written_out(node: Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a node with every alias written out; each node is walked once.

    An alias inside its own anchor counts as one value: the reader of the nodes refuses it.
    """
    known = sizes.get(id(node))
    if known is None:
        sizes[id(node)] = 1  # under way
        parts: list[Node] = []
        if isinstance(node, MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, SequenceNode):
            parts = node.value
        known = sizes[id(node)] = 1 + sum(_written_out(part, sizes) for part in parts)
    return known


class _Reader:
    """A reader that turns nodes into data, and notes the places of values and their problems."""

    def __init__(self, document: Document, *, lines: bool = True) -> None:
        self._document = document
        self._lines = lines

    def build(self, node: Node, *, place: Place, inside: tuple[Node, ...]) -> Any:
        if node in inside:
            return self._problem(node, place, "an alias that contains itself")
        if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, place=place, inside=(*inside, node))
        if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
            return self._sequence(node, place=place, inside=(*inside, node))
        if isinstance(node, ScalarNode):
            return self._scalar(node, place)
        return self._problem(node, place, f"the tag {node.tag} is not supported")

    def _mapping(self, node: MappingNode, *, place: Place, inside: tuple[Node, ...]) -> dict[str, Any]:
        # The mapping's own keys come last: they replace what is merged.
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                data |= self._merged(value_node, place=place, inside=inside)
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                continue
            if not isinstance(key_node, ScalarNode) or key_node.tag != f"{_TAG}str":
                self._problem(key_node, place, "a key that is not text; put it in quotes")
                continue
            key, here = key_node.value, (*place, key_node.value)
            self._note(key_node, here)
            value = self.build(value_node, place=here, inside=inside)
            if key in first:
                at = f"{dotted(here)} (line {key_node.start_mark.line + 1})"
                self._document.repeated.append(f"{at}: written twice, first in line {first[key]}")
            first.setdefault(key, key_node.start_mark.line + 1)
            data[key] = value
        return data

    def _merged(self, node: Node, *, place: Place, inside: tuple[Node, ...]) -> dict[str, Any]:
        """Return the keys that ``<<`` merges, from one mapping or several, of which the first with a key counts."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        data: dict[str, Any] = {}
        for source in reversed(sources):
            if isinstance(source, MappingNode):
                data |= self.build(source, place=place, inside=inside) or {}
            else:
                self._problem(node, (*place, "<<"), "merges the keys of a mapping, or of a list of mappings")
        return data

    def _sequence(self, node: SequenceNode, *, place: Place, inside: tuple[Node, ...]) -> list[Any]:
        data: list[Any] = []
        for index, item in enumerate(node.value):
            self._note(item, (*place, index))
            data.append(self.build(item, place=(*place, index), inside=inside))
        return data

    def _scalar(self, node: ScalarNode, place: Place) -> Any:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        try:
            match tag:
                case "str" | "merge":
                    return text
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    return int(text)
                case "float" if math.isfinite(number := float(text)):
                    return number
                case _:
                    pass
        except ValueError:
            pass
        return self._problem(node, place, f"cannot read {_short(repr(text))} as {tag}")

    def _note(self, node: Node, place: Place) -> None:
        if self._lines:
            self._document.origins[place] = f"line {node.start_mark.line + 1}"

    def _problem(self, node: Node, place: Place, message: str) -> None:
        where = f" (line {node.start_mark.line + 1})" if self._lines else self._document.at(place)
        name = dotted(place) or "top level"
        self._document.problems.append(f"{name}{where}: {message}")


def _forget(document: Document, place: Place) -> None:
    """Drop the origins of the values that an override replaces."""
    for known in [known for known in document.origins if known[: len(place)] == place]:
        del document.origins[known]


def _parts(path: str) -> Place | None:
    """Return the place of a path: ``("a", 0, "b")`` for ``a[0].b`` and ``a.0.b``; None if a part is empty."""
    parts = tuple(re.sub(r"\[(\d+)\]", r".\1", path).split("."))
    return tuple(int(part) if part.isdecimal() else part for part in parts) if all(parts) else None


def _into_rows(document: Document, parts: Place, row_sections: Collection[str]) -> Place:
    """Return the place with index 0 inserted after each list of one mapping that is named without an index."""
    place, inside = list(parts), document.data
    for depth in range(1, len(parts)):
        below = _child(inside, place[depth - 1])
        if not isinstance(place[depth], int) and (
            (is_list(below) and len(below) == 1 and is_object(below[0]))
            or (not below and dotted(tuple(place[:depth])) in row_sections)
        ):
            return _into_rows(document, (*place[:depth], 0, *place[depth:]), row_sections)
        inside = below
    return tuple(place)


def _child(data: Any, part: str | int) -> Any:
    if isinstance(part, str):
        return data.get(part) if is_object(data) else None
    return data[part] if is_list(data) and part < len(data) else None


def _reachable(document: Document, parts: Place, name: str) -> bool:
    """Return True if the values around a place can hold it or do not exist yet; else add a problem."""
    inside: Any = document.data
    for depth, part in enumerate(parts):
        around = parts[:depth]
        if inside is None:
            return True
        if isinstance(part, int) and not is_list(inside):
            found = f"is {describe(inside)} and no list"
        elif isinstance(part, int) and part > len(inside):
            found = f"ends before that; the next item is [{len(inside)}]"
        elif isinstance(part, str) and is_list(inside):
            found = f"is a list; write the item: {dotted((*around, 0))}" + f".{part}"
        elif isinstance(part, str) and not is_object(inside):
            found = f"is {describe(inside)} and has no keys"
        else:
            inside = _child(inside, part)
            continue
        document.problems.append(f"--set {name}: {dotted(around) or 'the file'}{document.at(around)} {found}")
        return False
    return True


def _assign(document: Document, parts: Place, value: Any) -> None:
    """Set the value at a place that :func:`_reachable` accepted; create missing sections and lists around it."""
    inside: Any = document.data
    for depth, part in enumerate(parts):
        if depth + 1 < len(parts) and _child(inside, part) is None:
            document.origins[parts[: depth + 1]] = document.origins[parts]
            _put(inside, part, [] if isinstance(parts[depth + 1], int) else {})
        if depth + 1 == len(parts):
            _put(inside, part, value)
        inside = _child(inside, part)


def _put(inside: Any, part: str | int, value: Any) -> None:
    if isinstance(part, int) and part == len(inside):
        inside.append(value)
    else:
        inside[part] = value
