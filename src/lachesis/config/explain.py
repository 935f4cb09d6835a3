"""What a key means: ours by the schema, those of other trainers by their tables onto it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lachesis.config.keys import Key, SectionInfo, all_keys, all_sections
from lachesis.config.suggest import nearest, nearest_path
from lachesis.errors import ConfigError


class Dialect(Protocol):
    """The names of another trainer: each with the canonical path of the key that it sets."""

    @property
    def name(self) -> str: ...

    @property
    def paths(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Explanation:
    """One key. ``default`` is None where it is required.

    ``kinds`` names the variants of the section that have it (empty: all); ``dialect`` the table through which
    it was found (empty: it is our own name).
    """

    key: str
    path: str
    type: str
    default: str | None
    description: str
    section: str
    kinds: tuple[str, ...] = ()
    dialect: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a name stands for: one key, a whole section (then ``description`` is its own), or several keys."""

    query: str
    meaning: Literal["key", "section", "several"]
    explanations: tuple[Explanation, ...]
    description: str = ""


def explain(key: str, *, dialects: Sequence[Dialect] = ()) -> Answer:
    """Explain a dotted path, the end of one (``steps``, ``wandb.name``), or a name in a dialect.

    Leading dashes are dropped and dashes read as underscores. A full path wins over a bare name; a bare name
    that several keys have, ours or a dialect's, is answered with all of them.

    Raises:
        ConfigError: nothing has that name; the remedy is the nearest one.
    """
    name = _plain(key)
    section = next((section for section in all_sections() if section.path == name and name), None)
    if section is not None:
        return _section_answer(key, section)
    exact = [_explanation(key, found) for found in all_keys() if found.path == name]
    if exact:
        return _answer(key, exact)
    by_end = [_explanation(key, found) for found in all_keys() if found.path.endswith(f".{name}")]
    found = [*by_end, *_in_dialects(key, dialects)]
    if found:
        return _answer(key, found)
    sections = [section for section in all_sections() if section.path.endswith(f".{name}")]
    if len(sections) == 1:
        return _section_answer(key, sections[0])
    raise _unknown(key, dialects)


def _plain(key: str) -> str:
    return key.strip().lstrip("-").replace("-", "_")


def _explanation(query: str, key: Key, *, dialect: str = "") -> Explanation:
    return Explanation(
        key=query,
        path=key.path,
        type=key.type,
        default=key.default,
        description=key.description,
        section=key.section,
        kinds=key.kinds,
        dialect=dialect,
    )


def _answer(query: str, explanations: Sequence[Explanation]) -> Answer:
    meaning = "key" if len(explanations) == 1 else "several"
    return Answer(query=query, meaning=meaning, explanations=tuple(explanations))


def _section_answer(query: str, section: SectionInfo) -> Answer:
    """The keys of a section and of the sections in it."""
    inside = [
        _explanation(query, key)
        for key in all_keys()
        if key.section == section.path or key.section.startswith(f"{section.path}.")
    ]
    return Answer(query=query, meaning="section", explanations=tuple(inside), description=section.description)


def _in_dialects(query: str, dialects: Sequence[Dialect]) -> list[Explanation]:
    name = _plain(query)
    return [
        _explanation(query, key, dialect=dialect.name)
        for dialect in dialects
        for theirs, path in dialect.paths.items()
        if _plain(theirs) == name
        for key in all_keys()
        if key.path == path
    ]


def _unknown(query: str, dialects: Sequence[Dialect]) -> ConfigError:
    name = _plain(query)
    theirs = nearest(name, [_plain(theirs) for dialect in dialects for theirs in dialect.paths])
    closest = nearest_path(name) or theirs
    sections = ", ".join(section.path for section in all_sections() if section.path)
    remedy = f"did you mean {closest}?" if closest else f"the sections are {sections}"
    return ConfigError(f"no key is called {query!r}", remedy=remedy)
