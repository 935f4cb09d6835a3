"""Explanation of keys: ours by the schema, other trainers' by their tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from lachesis.common.errors import ConfigError, nearest
from lachesis.config.keys import (
    Key,
    SectionInfo,
    all_keys,
    all_sections,
    find_keys,
    find_section,
    nearest_path,
    value_in_words,
)
from lachesis.config.presets import PRESETS
from lachesis.config.schema import MixedSourceConfig
from lachesis.plugins.dialects import DIALECTS, swift
from lachesis.plugins.dialects.atropos import TRAINER
from lachesis.plugins.dialects.scripts import PRIME_RL
from lachesis.plugins.dialects.table import UNSET, Dialect, Entry, constructors

CONSTRUCTORS = constructors()

# ``GRPOConfig(beta=0.04)``, ``GRPOConfig(beta)``, ``GRPOConfig.beta`` or ``beta=0.04``.
_CALL = re.compile(
    r"(?P<call>(?:Axolotl)?GRPO(?:Config|Trainer)|LoraConfig|AxolotlTrainingArguments)?(?(call)[.(]?)"
    r"(?P<name>[\w.-]*)(?:=.*?)?,?\)?",
    re.DOTALL,
)

# A key of one of several sources: ``sources.weight`` or ``sources[0].weight``.
_OF_A_SOURCE = re.compile(r"sources(?:\[\d+\])?\.(.+)")

_ENVIRONMENT_FLAG = (
    "a flag of an Atropos environment, not of the trainer: put it into services.environment.args; the environment's "
    "own --help explains it"
)


_PRESET = "algorithm.preset"


@dataclass(frozen=True, slots=True)
class Alias:
    """Another trainer's name for a key.

    ``default`` is our value if their file does not set it and our own default differs (else None); ``note`` says
    what differs in its meaning here.
    """

    dialect: str
    name: str
    default: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Explanation(Key):
    """Our key, and its names elsewhere.

    ``dialect`` is the table through which it was found (empty: it is our own name); ``aliases`` its names in all
    tables. A name that sets nothing here has an empty ``path``, and ``description`` says what Lachesis does instead.
    """

    dialect: str = ""
    aliases: tuple[Alias, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Meaning of a name: one key, a whole section (``description`` is the section's), or several keys."""

    query: str
    meaning: Literal["key", "section", "several"]
    explanations: tuple[Explanation, ...]
    description: str = ""


def explain(key: str, *, dialects: Sequence[Dialect] = (*DIALECTS, swift.NAMES, PRIME_RL, CONSTRUCTORS)) -> Answer:
    """Explain a dotted path, the end of one (``steps``, ``wandb.name``), or a name in a dialect.

    Leading dashes are dropped and dashes read as underscores. A full path takes precedence over a bare name; for a bare
    name of several keys, ours or a dialect's, all of them are returned. A keyword of a constructor of TRL or Axolotl
    may be written as there (``GRPOConfig(beta=0.04)``, ``beta=0.04``).

    Raises:
        ConfigError: nothing has that name; the remedy is the nearest one.
    """
    name = _plain(key)
    if within := _OF_A_SOURCE.fullmatch(name):
        found = [replace(one, path=f"sources.{one.path}") for one in find_keys(within[1], MixedSourceConfig)]
        if found:
            return _answer(key, [_explanation(one, ()) for one in found])
    section = find_section(name)
    if name and section is not None:
        return _section_answer(key, section, dialects)
    if exact := find_keys(name):
        return _answer(key, [_explanation(found, dialects) for found in exact])
    by_end = [_explanation(found, dialects) for found in all_keys() if found.path.endswith(f".{name}")]
    paths = {found.path for found in by_end}
    found = [*by_end, *(found for found in _in_dialects(name, dialects) if found.path not in paths)]
    if found:
        return _answer(key, found)
    if name in PRESETS:
        return _answer(key, [_explanation(found, ()) for found in find_keys(_PRESET)])
    if key.strip().lstrip("-").startswith(("env.", "openai.", "slurm.", "teacher.")):
        flag = Entry(key.strip().partition("=")[0].lstrip("-"), note=_ENVIRONMENT_FLAG)
        return _answer(key, [_without_key(TRAINER, flag)])
    sections = [section for section in all_sections() if section.path.endswith(f".{name}")]
    if len(sections) == 1:
        return _section_answer(key, sections[0], dialects)
    raise _unknown(key, dialects)


def _plain(key: str) -> str:
    """Return a name in the tables' form: without leading dashes or ``$``, and a constructor or value around it."""
    written = _CALL.fullmatch(key.strip())
    name = key.strip() if written is None else written["name"] or written["call"] or ""
    return name.lstrip("-$").replace("-", "_")


def _explanation(key: Key, dialects: Sequence[Dialect], *, dialect: str = "") -> Explanation:
    own = {field.name: getattr(key, field.name) for field in fields(Key)}
    return Explanation(**own, dialect=dialect, aliases=tuple(_aliases(key.path, dialects)))


def _aliases(path: str, dialects: Sequence[Dialect]) -> Iterator[Alias]:
    if path == _PRESET:
        for name, keys in PRESETS.items():
            yield Alias("preset", name, note=", ".join(f"{key}: {value_in_words(keys[key])}" for key in keys))
    for dialect in dialects:
        for entry in dialect.by_path.get(path, ()):
            default = None if entry.default is UNSET else value_in_words(entry.default)
            yield Alias(dialect.name, f"{dialect.prefix}{entry.name}", default, entry.note)


def _answer(query: str, explanations: Sequence[Explanation]) -> Answer:
    meaning = "key" if len(explanations) == 1 else "several"
    return Answer(query=query, meaning=meaning, explanations=tuple(explanations))


def _section_answer(query: str, section: SectionInfo, dialects: Sequence[Dialect]) -> Answer:
    """Return the keys of a section and of the sections in it."""
    inside = [
        _explanation(key, dialects)
        for key in all_keys()
        if key.section == section.path or key.section.startswith(f"{section.path}.")
    ]
    return Answer(query=query, meaning="section", explanations=tuple(inside), description=section.description)


def _in_dialects(name: str, dialects: Sequence[Dialect]) -> list[Explanation]:
    """Return the keys that another trainer's name, whole or its last part, sets here; each key once."""
    found: dict[str, Explanation] = {}
    for dialect in dialects:
        for theirs, entry in dialect.entries.items():
            if _plain(theirs) != name and not _plain(theirs).endswith(f".{name}"):
                continue
            keys = [key for key in all_keys() if entry.path and key.path == entry.path]
            for key in keys:
                found.setdefault(key.path, _explanation(key, dialects, dialect=dialect.name))
            if not keys:
                found.setdefault(f"{dialect.name} {theirs}", _without_key(dialect, entry))
    return list(found.values())


def _without_key(dialect: Dialect, entry: Entry) -> Explanation:
    how = {"cannot": "not honoured: ", "refused": "refused: "}.get(entry.treatment, "")
    aliases = (Alias(dialect.name, f"{dialect.prefix}{entry.name}"),)
    nothing = Key(path="", section="", name=entry.name, type="", default="unset", description=f"{how}{entry.note}")
    return replace(_explanation(nothing, ()), dialect=dialect.name, aliases=aliases)


def _unknown(query: str, dialects: Sequence[Dialect]) -> ConfigError:
    name = _plain(query)
    theirs = nearest(name, [_plain(theirs) for dialect in dialects for theirs in dialect.entries])
    closest = nearest_path(name) or theirs
    sections = ", ".join(section.path for section in all_sections() if section.path)
    remedy = f"did you mean {closest}?" if closest else f"the sections are {sections}"
    return ConfigError(f"no key is called {query!r}", remedy=remedy)
