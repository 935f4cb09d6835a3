"""What a key means: ours by the schema, those of other trainers by their tables onto it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lachesis.common.errors import ConfigError, nearest
from lachesis.config.dialects import DIALECTS
from lachesis.config.dialects.table import UNSET, Dialect, Entry
from lachesis.config.keys import Key, SectionInfo, all_keys, all_sections, nearest_path, value_in_words


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of another trainer's for a key.

    ``default`` is our value where their file does not say, if that is not our own default (else None); ``note``
    what it means there that it does not mean here.
    """

    dialect: str
    name: str
    default: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One key. ``default`` is None where it is required.

    ``kinds`` names the variants of the section that have it (empty: all); ``dialect`` the table through which
    it was found (empty: it is our own name); ``aliases`` its names in all tables. A name of theirs that sets
    nothing here has the empty ``path``, and ``description`` says what Lachesis does instead.
    """

    key: str
    path: str
    type: str
    default: str | None
    description: str
    section: str
    kinds: tuple[str, ...] = ()
    dialect: str = ""
    aliases: tuple[Alias, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a name stands for: one key, a whole section (then ``description`` is its own), or several keys."""

    query: str
    meaning: Literal["key", "section", "several"]
    explanations: tuple[Explanation, ...]
    description: str = ""


def explain(key: str, *, dialects: Sequence[Dialect] = DIALECTS) -> Answer:
    """Explain a dotted path, the end of one (``steps``, ``wandb.name``), or a name in a dialect.

    Leading dashes are dropped and dashes read as underscores. A full path wins over a bare name; a bare name
    that several keys have, ours or a dialect's, is answered with all of them.

    Raises:
        ConfigError: nothing has that name; the remedy is the nearest one.
    """
    name = _plain(key)
    section = next((section for section in all_sections() if section.path == name and name), None)
    if section is not None:
        return _section_answer(key, section, dialects)
    exact = [_explanation(key, found, dialects) for found in all_keys() if found.path == name]
    if exact:
        return _answer(key, exact)
    by_end = [_explanation(key, found, dialects) for found in all_keys() if found.path.endswith(f".{name}")]
    paths = {found.path for found in by_end}
    found = [*by_end, *(found for found in _in_dialects(key, dialects) if found.path not in paths)]
    if found:
        return _answer(key, found)
    sections = [section for section in all_sections() if section.path.endswith(f".{name}")]
    if len(sections) == 1:
        return _section_answer(key, sections[0], dialects)
    raise _unknown(key, dialects)


def _plain(key: str) -> str:
    return key.strip().lstrip("-").replace("-", "_")


def _explanation(query: str, key: Key, dialects: Sequence[Dialect], *, dialect: str = "") -> Explanation:
    return Explanation(
        key=query,
        path=key.path,
        type=key.type,
        default=key.default,
        description=key.description,
        section=key.section,
        kinds=key.kinds,
        dialect=dialect,
        aliases=tuple(_aliases(key.path, dialects)),
    )


def _aliases(path: str, dialects: Sequence[Dialect]) -> Iterator[Alias]:
    for dialect in dialects:
        for entry in dialect.by_path.get(path, ()):
            default = None if entry.default is UNSET else value_in_words(entry.default)
            yield Alias(dialect.name, f"{dialect.prefix}{entry.name}", default, entry.note)


def _answer(query: str, explanations: Sequence[Explanation]) -> Answer:
    meaning = "key" if len(explanations) == 1 else "several"
    return Answer(query=query, meaning=meaning, explanations=tuple(explanations))


def _section_answer(query: str, section: SectionInfo, dialects: Sequence[Dialect]) -> Answer:
    """The keys of a section and of the sections in it."""
    inside = [
        _explanation(query, key, dialects)
        for key in all_keys()
        if key.section == section.path or key.section.startswith(f"{section.path}.")
    ]
    return Answer(query=query, meaning="section", explanations=tuple(inside), description=section.description)


def _in_dialects(query: str, dialects: Sequence[Dialect]) -> list[Explanation]:
    """What a name of theirs, whole or its last part, sets here; each key once."""
    name = _plain(query)
    found: dict[str, Explanation] = {}
    for dialect in dialects:
        for theirs, entry in dialect.entries.items():
            if _plain(theirs) != name and not _plain(theirs).endswith(f".{name}"):
                continue
            keys = [key for key in all_keys() if entry.path and key.path == entry.path]
            for key in keys:
                found.setdefault(key.path, _explanation(query, key, dialects, dialect=dialect.name))
            if not keys:
                found.setdefault(f"{dialect.name} {theirs}", _without_key(query, dialect, entry))
    return list(found.values())


def _without_key(query: str, dialect: Dialect, entry: Entry) -> Explanation:
    how = {"cannot": "not honoured: ", "refused": "refused: "}.get(entry.treatment, "")
    return Explanation(
        key=query,
        path="",
        type="",
        default="unset",
        description=f"{how}{entry.note}",
        section="",
        dialect=dialect.name,
        aliases=(Alias(dialect.name, f"{dialect.prefix}{entry.name}"),),
    )


def _unknown(query: str, dialects: Sequence[Dialect]) -> ConfigError:
    name = _plain(query)
    theirs = nearest(name, [_plain(theirs) for dialect in dialects for theirs in dialect.entries])
    closest = nearest_path(name) or theirs
    sections = ", ".join(section.path for section in all_sections() if section.path)
    remedy = f"did you mean {closest}?" if closest else f"the sections are {sections}"
    return ConfigError(f"no key is called {query!r}", remedy=remedy)
