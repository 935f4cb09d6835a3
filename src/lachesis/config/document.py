"""YAML files as data with the position of every value, and their conversion back to text.

Scalars are read by the rules of YAML 1.2: ``on``, ``no`` and dates are text, ``1e-6`` is a number. ``<<`` merges the
keys of another mapping, which YAML 1.2 dropped but existing files still use. Other trainers read their files by YAML
1.1, where ``on`` and ``no`` are switches and ``1_000`` is a number: :meth:`Document.take_older`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lachesis.common.errors import ConfigError, did_you_mean

Place = tuple[str | int, ...]

# Limit on the values of a configuration with aliases expanded: nested aliases in a few lines can stand for billions.
_MOST_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")


class _Loader(yaml.SafeLoader):
    """A loader that tags scalars by the core schema of YAML 1.2."""


# The pyright comments here are for functions that PyYAML's stubs leave untyped.
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _pattern, _first)  # pyright: ignore[reportUnknownMemberType]


_OLDER: Any = yaml.SafeLoader("")


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text that YAML 1.1 or 1.2 would read as another type, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    f"{_TAG}float", _FLOAT, list("-+.0123456789")
)


# The name that errors use for keys that are not from a file.
FROM_PYTHON = "the keys given from Python"


@dataclass(slots=True)
class Document:
    """The data of a file, the place of each value (``line 7``, ``--set a.b``), and the problems found.

    ``problems`` has a line for each problem found without the schema. ``repeated`` has one for each key that is written
    twice; the last value counts. ``older`` has the values that YAML 1.1 reads otherwise. ``spelled`` returns the name
    in the file's dialect of a canonical key that is not in the file; it is unset if the file uses canonical keys.
    ``unread`` is True if a problem is a value that only a shell knows; then nothing is said of the default instead.
    """

    name: str
    data: dict[str, Any]
    origins: dict[Place, str] = field(default_factory=dict[Place, str])
    problems: list[str] = field(default_factory=list[str])
    repeated: list[str] = field(default_factory=list[str])
    older: dict[Place, bool | int | float] = field(default_factory=dict[Place, "bool | int | float"])
    spelled: Callable[[str], str | None] = lambda path: None
    unread: bool = False

    def take_older(self) -> Document:
        """Replace the values that YAML 1.1 reads otherwise by those, as the loaders of other trainers do."""
        for (*folders, last), value in self.older.items():
            inside: Any = self.data
            for part in folders:
                inside = inside[part]
            inside[last] = value
        self.older = {}
        return self

    def at(self, place: Place) -> str:
        """Return `` (line 7)`` for the value at ``place``, or for the nearest section around it that was written."""
        for length in range(len(place), 0, -1):
            if place[:length] in self.origins:
                return f" ({self.origins[place[:length]]})"
        return ""

    def setting(self, key: str, value: str) -> str:
        """Return how the user would set a value: ``--set run.steps=10``, or ``run.steps=10`` as a Python argument."""
        if self.name != FROM_PYTHON:
            return f"--set {key}={value}"
        return f"{key}={value}" if "." not in key else f'"{key}": {value}'


def dotted(place: Place) -> str:
    """Return a place as a dotted path: ``rewards.weights[1]`` for ``("rewards", "weights", 1)``."""
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
        beside = [one.name for one in path.parent.glob("*") if one.is_file()]
        remedy = did_you_mean(path.name, beside, otherwise="check the path", cutoff=0.7)
        raise ConfigError(f"no configuration file {path}", remedy=remedy) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}", remedy="save it as UTF-8") from error
    except OSError as error:
        inside = next(path.glob("*.y*ml"), None) if path.is_dir() else None
        remedy = f"give a readable file{f', such as {inside}' if inside else ''}"
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy=remedy) from error
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a Python script, not a configuration",
            remedy="run it with python; a script for TRL needs `from lachesis.trl import ...` in place of `from trl`",
        )
    return parse_document(text, name=str(path))


def parse_document(text: str, *, name: str) -> Document:
    """Parse YAML text; errors refer to it as ``name``. Raises the errors of :func:`read_document`."""
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


def read_value(document: Document, text: str, *, name: str, place: Place) -> Any:
    """Read the YAML text of one value that is put at ``place``, and note its problems; errors refer to it as ``name``.

    Raises:
        ConfigError: the text is not YAML.
    """
    node = _compose(text, name=name)
    return None if node is None else _Reader(document, lines=False).build(node, place=place, inside=())


def to_yaml(data: Any) -> str:
    """Return YAML text that :func:`parse_document` reads back equal, with keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def describe(value: Any) -> str:
    """Describe a value for an error message, in at most one line: text in quotes, collections by name."""
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
                f"{name}: its aliases (*name) expand to more than {_MOST_VALUES:,} values",
                remedy="write the values out, or use fewer nested aliases",
            )
        return node
    except RecursionError as error:
        raise ConfigError(
            f"{name}: it is nested too deeply", remedy="use at most a few levels of sections and keys"
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
    """Return the number of values in a node with every alias expanded; each node is visited once.

    An alias inside its own anchor counts as one value; :class:`_Reader` rejects it later.
    """
    known = sizes.get(id(node))
    if known is None:
        sizes[id(node)] = 1  # being counted
        parts: list[Node] = []
        if isinstance(node, MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, SequenceNode):
            parts = node.value
        known = sizes[id(node)] = 1 + sum(_written_out(part, sizes) for part in parts)
    return known


class _Reader:
    """A reader that turns nodes into data and records the places of values and any problems."""

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
        # The mapping's own keys come last, so they replace merged ones.
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
            older = self._document.older
            for replaced in [known for known in older if known[: len(here)] == here]:
                del older[replaced]
            value = self.build(value_node, place=here, inside=inside)
            if key in first:
                at = f"{dotted(here)} (line {key_node.start_mark.line + 1})"
                self._document.repeated.append(f"{at}: written twice, first in line {first[key]}")
            first.setdefault(key, key_node.start_mark.line + 1)
            data[key] = value
        return data

    def _merged(self, node: Node, *, place: Place, inside: tuple[Node, ...]) -> dict[str, Any]:
        """Return the keys that ``<<`` merges from one or several mappings; the first mapping that has a key wins."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        data: dict[str, Any] = {}
        for source in reversed(sources):
            if isinstance(source, MappingNode):
                data |= self.build(source, place=place, inside=inside) or {}
            else:
                self._problem(node, (*place, "<<"), "takes a mapping or a list of mappings")
        return data

    def _sequence(self, node: SequenceNode, *, place: Place, inside: tuple[Node, ...]) -> list[Any]:
        data: list[Any] = []
        for index, item in enumerate(node.value):
            self._note(item, (*place, index))
            data.append(self.build(item, place=(*place, index), inside=inside))
        return data

    def _scalar(self, node: ScalarNode, place: Place) -> Any:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        if self._lines and node.style is None and tag in ("str", "int"):
            self._note_older(text, place)
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

    def _note_older(self, text: str, place: Place) -> None:
        """Note a switch or number of YAML 1.1 that is text, or another number, in YAML 1.2."""
        tag = str(_OLDER.resolve(ScalarNode, text, (True, False)))
        if tag.removeprefix(_TAG) in ("bool", "int", "float"):
            value: Any = _OLDER.construct_object(ScalarNode(tag, text))
            if text != str(value) and math.isfinite(value):
                self._document.older[place] = value

    def _note(self, node: Node, place: Place) -> None:
        if self._lines:
            self._document.origins[place] = f"line {node.start_mark.line + 1}"

    def _problem(self, node: Node, place: Place, message: str) -> None:
        where = f" (line {node.start_mark.line + 1})" if self._lines else self._document.at(place)
        name = dotted(place) or "top level"
        self._document.problems.append(f"{name}{where}: {message}")
