"""Text of `lachesis grpo --help`: every flag, in groups, with the key that it sets."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lachesis.config.keys import find_keys, value_in_words
from lachesis.plugins.dialects.atropos import FLAGS, TRAINER
from lachesis.plugins.dialects.table import UNSET, Entry
from lachesis.plugins.dialects.words import read_table

_TEXTS = read_table("atropos_help")
RUN_HELP: str = _TEXTS["run"]
"""Text of `lachesis run --help`, with a field for the ``names`` of environments."""

_WIDTH = 110


def help_text() -> str:
    """Return every flag of the Atropos trainer with the key that it sets, in groups, and our own flags."""
    left = {name: entry for name, entry in TRAINER.entries.items() if name not in (*FLAGS.spellings, "benchmark")}
    parts = [_TEXTS["usage"]]
    for group, prefixes in _TEXTS["groups"].items():
        names = [name for name in left if any(name == p or name.startswith(f"{p}-") for p in prefixes)]
        parts += _group(group, [left.pop(name) for name in names])
    parts += _group("Accepted without an effect, or refused", list(left.values()))
    return "\n".join([*parts, _TEXTS["own"]])


def _group(title: str, entries: Sequence[Entry]) -> list[str]:
    return [title, *(line for entry in entries for line in _flag(entry)), ""] if entries else []


def _flag(entry: Entry) -> list[str]:
    """Return lines with all names of the flag, and its meaning below."""
    names = [entry.name, *(other for other, name in FLAGS.spellings.items() if name == entry.name)]
    value = "" if entry.name in FLAGS.switches else " " + entry.name.rpartition("-")[2].upper()
    first = "  " + ", ".join(f"--{name}" for name in names) + value
    return [first, *textwrap.wrap(_meaning(entry), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _meaning(entry: Entry) -> str:
    if not entry.path:
        return f"{entry.note[0].upper()}{entry.note[1:]}."
    default = "" if entry.default is UNSET else f", default {value_in_words(entry.default)}"
    text = _TEXTS["meanings"].get(entry.name) or find_keys(entry.path)[0].description
    return f"{text} [{entry.path}{default}]"
