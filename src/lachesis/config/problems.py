"""Schema problems of a document, one line each: key, place, what is wrong, and what is expected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from lachesis.common.errors import ConfigError, nearest
from lachesis.common.json_values import is_list, is_object
from lachesis.config.document import Document, Place, describe, dotted
from lachesis.config.keys import Key, SectionInfo, all_keys, find_keys, find_section, paths_named, unknown_key_hint
from lachesis.config.schema import LachesisConfig
from lachesis.plugins import load

# A canonical dotted key, with an optional list index; not part of a longer path or of a file name.
_PATH = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(\[\d+\])?(?![\w/-]|\.\w)")
_YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def config_error(name: str, problems: list[str]) -> ConfigError:
    """Return one error for all problems of a configuration, with a line each."""
    if len(problems) == 1:
        message = f"{name}: {problems[0]}"
    else:
        message = "\n".join([f"{name}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])
    return ConfigError(message, remedy="correct the configuration; `lachesis explain KEY` describes a key")


def located(message: str, document: Document) -> str:
    """Return the message with the place in the user's file added after each canonical key.

    ``rewards.weights`` becomes ``rewards.weights (line 40: reward_weights)``, or ``(TRL's reward_weights)`` if the file
    is in another trainer's dialect and does not set it.
    """
    said: set[str] = set()

    def place(match: re.Match[str]) -> str:
        path = match[1]
        if match[0] in said or not find_keys(path) or message.startswith(" (", match.end()):
            return match[0]
        said.add(match[0])
        parts: Place = tuple(path.split("."))
        item = (*parts, int(match[2][1:-1])) if match[2] else parts
        found = document.origins.get(item) or document.origins.get(parts) or document.spelled(path)
        return f"{match[0]} ({found})" if found else match[0]

    return _PATH.sub(place, message)


def missing_problems(document: Document) -> list[str]:
    """Return problems for missing keys that a run needs but the schema does not: length, and local data and rewards."""
    length: list[Place] = [] if _lookup(document.data, ("run", "epochs")) is not None else [("run", "steps")]
    several = bool(document.data.get("sources"))
    found = unwritten(length if several else [*length, *needed(document)], document)
    found += load("sources", "mixture_problems")(document) if several else []
    if all(_lookup(document.data, ("run", name)) is not None for name in ("steps", "epochs")):
        found.append("run.steps and run.epochs both set the length of the run; keep one")
    return found


def needed(document: Document) -> list[Place]:
    """Return the keys that the document's kind of source requires."""
    local = _kind("source", document, LachesisConfig) in ("local", "agent")
    return [("data", "path"), ("rewards", "functions")] if local else []


def unwritten(keys: Sequence[Place], document: Document) -> list[str]:
    """Return a problem for each of these keys that the document does not have."""
    absent = [key for key in keys if _lookup(document.data, key) in (None, [])]
    return ["".join(_missing(find_keys(dotted(key))[0], document)) for key in absent]


def schema_problems(error: ValidationError, document: Document, root: type[BaseModel] = LachesisConfig) -> list[str]:
    """Return every schema problem with the document's own keys and lines: one per key, or per list item."""
    details = error.errors(include_url=False)
    inside = [one for one in details if root is LachesisConfig and one["loc"][:1] == ("sources",) and one["loc"][2:]]
    found = problems_of([one for one in details if one not in inside], document, root)
    return found + load("sources", "mixture_problems")(document, inside) if inside else found


def problems_of(details: Sequence[Mapping[str, Any]], document: Document, root: type[BaseModel]) -> list[str]:
    """Return the validation errors of ``root`` as problems, in the form of :func:`schema_problems`."""
    found: dict[str, str] = {}
    for detail in details:
        place, index = _place(detail["loc"], root)
        if item := _in_a_mapping_of_a_list(detail, place=place, document=document):
            found.setdefault(*item)
            continue
        if ".".join(map(str, place)) in found:  # another branch of the same union
            continue
        for name, problem in _problems(detail, place=place, index=index, document=document, root=root):
            found.setdefault(name, problem)
    return [f"{name}{problem}" for name, problem in found.items()]


def _place(location: tuple[str | int, ...], root: type[BaseModel]) -> tuple[Place, int | None]:
    """Return the key that an error is about, and the index in its list.

    The validator's location also has the variant of a tagged section and the branch of a union; the file has neither.
    """
    place: tuple[str, ...] = ()
    parts = iter(location)
    for part in parts:
        place = (*place, str(part))
        path = ".".join(place)
        if find_keys(path, root):
            index = next((rest for rest in parts if isinstance(rest, int)), None)
            return place, index
        section = find_section(path, root)
        if section and section.discriminated:
            next(parts, None)
    return place, None


def _in_a_mapping_of_a_list(detail: Mapping[str, Any], *, place: Place, document: Document) -> tuple[str, str] | None:
    """Return a problem inside a list of mappings, such as ``data.more[0].split``; None if it is not in one."""
    rest = detail["loc"][len(place) :]
    of_mappings = any("list of mappings" in key.type for key in find_keys(".".join(map(str, place))))
    if not of_mappings or len(rest) != 2 or not isinstance(rest[0], int) or not isinstance(rest[1], str):
        return None
    here = (*place, *rest)
    if detail["type"] == "extra_forbidden":
        return dotted(here), f"{document.at(here)}: unknown key; {find_keys('.'.join(map(str, place)))[0].type}"
    return dotted(here), f"{document.at(here)}: {detail['msg']}, got {describe(detail['input'])}"


def _problems(
    detail: Mapping[str, Any], *, place: Place, index: int | None, document: Document, root: type[BaseModel]
) -> list[tuple[str, str]]:
    """Return the problems in one validation error, as pairs of a dotted key and the text after it."""
    path = ".".join(map(str, place))
    section, keys = find_section(path, root), find_keys(path, root)
    match detail["type"]:
        case "extra_forbidden":
            return [(path, f"{document.at(place)}: unknown key; {_hint(place, document, root)}")]
        case "missing" if section:
            return [_missing(key, document) for key in _required(section, root)]
        case "missing" if keys and index is None:
            return [_missing(keys[0], document)]
        case "union_tag_invalid" | "union_tag_not_found" if section:
            return [_wrong(find_keys(f"{path}.kind", root)[0], place=(*place, "kind"), document=document)]
        case "value_error" | "assertion_error":
            return [(path or document.name, f"{document.at(place)}: {detail['msg']}")]
        case _:
            pass
    if keys:
        kind = _kind(keys[0].section, document, root)
        key = next((key for key in keys if not key.kinds or kind in key.kinds), keys[0])
        return [_wrong(key, place=place, document=document, index=index)]
    if section:
        found = describe(detail["input"])
        kinds = [choice for key in find_keys(f"{path}.kind", root) for choice in key.choices]
        instead = f"write {path}.kind: {detail['input']}" if detail["input"] in kinds else "give it keys or remove it"
        return [(path, f"{document.at(place)}: expected keys, got {found}; {instead}")]
    return [(path or document.name, f"{document.at(place)}: {detail['msg']}")]


def _required(section: SectionInfo, root: type[BaseModel]) -> list[Key]:
    """Return the required keys of a missing section."""
    return [key for key in all_keys(root) if key.section == section.path and key.default is None]


def _missing(key: Key, document: Document) -> tuple[str, str]:
    meaning = key.description.split(" Required")[0]
    if (theirs := document.spelled(key.path)) is not None:
        return theirs, f": missing, but required (here {key.path}): {meaning}"
    return key.path, f"{document.at(tuple(key.path.split('.')))}: missing, but required: {meaning}"


def _hint(place: Place, document: Document, root: type[BaseModel]) -> str:
    section = ".".join(map(str, place[:-1]))
    from lachesis.plugins.dialects import DIALECTS
    from lachesis.plugins.dialects.table import constructors

    ours = not issubclass(root, LachesisConfig) or paths_named(str(place[-1]))
    for dialect in () if ours else (*DIALECTS, constructors()):
        entry = dialect.entries.get(".".join(map(str, place)))
        if entry is not None and entry.path:
            return f"it is {dialect.name}'s; here it is {entry.path}"
    kind = _kind(section, document, root)
    return unknown_key_hint(section=section, name=str(place[-1]), kind=kind, root=root)


def _kind(section: str, document: Document, root: type[BaseModel]) -> str | None:
    """Return the kind of a section: the document's, else the default."""
    written = _lookup(document.data, (*section.split("."), "kind"))
    info = find_section(section, root)
    return written if isinstance(written, str) else info and info.default_kind


def _wrong(key: Key, *, place: Place, document: Document, index: int | None = None) -> tuple[str, str]:
    """Return the key, and text with the expected and the found value and a likely correction."""
    value = _lookup(document.data, place)
    item, item_place = value, place
    if index is not None and is_list(value) and index < len(value):
        item, item_place = value[index], (*place, index)
    expected, correction = _with_article(key.type), _correction(key, item)
    text = f"{document.at(item_place)}: expected {expected}, got {describe(item)}{correction}"
    return dotted(item_place), text


def _correction(key: Key, value: Any) -> str:
    if isinstance(value, str) and (choice := nearest(value, key.choices)):
        return f"; did you mean {choice}?"
    if isinstance(value, str) and key.type == "true or false" and value.lower() in _YAML_1_1_BOOLEANS:
        return f"; write {_YAML_1_1_BOOLEANS[value.lower()]}"
    if isinstance(value, str) and "list of text" in key.type and not key.type.startswith("text or"):
        return f"; write [{value}]"
    if isinstance(value, bool | int | float) and "text" in key.type:
        return "; put it in quotes"
    if isinstance(value, float) and value.is_integer() and key.type.startswith("whole number"):
        return f"; write {int(value)}"
    return ""


def _with_article(words: str) -> str:
    starts = ("whole", "number", "list", "non-empty", "mapping")
    return f"a {words}" if words.startswith(starts) else words


def _lookup(data: Any, place: Place) -> Any:
    for part in place:
        if not is_object(data) or not isinstance(part, str):
            return None
        data = data.get(part)
    return data
