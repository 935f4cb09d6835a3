"""Each row of rules.toml and of the tables of refusals says something, of keys that there are."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any, get_args

import pytest

import lachesis
from lachesis.common.types import LEVELS
from lachesis.config.keys import find_keys, find_section
from lachesis.config.rules import table
from lachesis.config.schema import LachesisConfig, TeacherConfig
from lachesis.config.schema.mesh import derive_mesh


def rows_of(file: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of all tables in files of this name, each with the name of its room and its own."""
    return [
        (f"{path.parent.name} {name}", row)
        for path in sorted(Path(lachesis.__file__).parent.rglob(file))
        for name, rows in tomllib.loads(path.read_text()).items()
        for row in rows
    ]


ROWS, REFUSALS = rows_of("rules.toml"), rows_of("refusals.toml")
# Names that only refusals have.
GIVEN: dict[str, Any] = {"ranks": 2, "here": 2, "workers": 2, "words": "", "suited": "", "why": ""}
# Of the configuration itself, and of sections beside their keys: what they compute.
COMPUTED = {
    "engine.place",
    "engine.servers_on_own_card",
    "evaluation.lacks",
    "model.sees_images",
    "algorithm.holds_reference",
    "algorithm.model_fields_set",
    "data.evaluates",
    "engine.rounds",
}
WORDS = {"changed", "listed", "do", "key", "shared_key", "rounded_key", "url.startswith"}


def names_in(row: dict[str, Any]) -> Iterator[str]:
    """Yield the dotted names of a row: in its condition without texts, in its lists and in its message."""
    yield from re.findall(r"(?<![\w.])[a-z]\w*(?:\.\w+)+", re.sub(r"'[^']*'", "", row["when"]))
    yield from (*row.get("changed", ()), *row.get("each", ()))
    for said in (*LEVELS, "refused", "remedy"):
        for _, name, _, _ in Formatter().parse(row.get(said, "")):
            if name:
                yield name.partition("[")[0]


def named_by(row: dict[str, Any]) -> set[str]:
    """Return the names that a row's own condition gives: to values for its message, and to the items of a list."""
    return set(re.findall(r"(\w+) :=", row["when"])) | set(re.findall(r" for (\w+) in ", row["when"]))


@pytest.mark.parametrize(("name", "row"), ROWS + REFUSALS)
def test_a_row_names_keys_that_there_are(name: str, row: dict[str, Any]):
    said = {level for level in LEVELS if level in row} if "refused" not in row else {"refused", "remedy"}
    assert said == row.keys() - {"when", "changed", "each"}
    assert len(said) == 1 or "refused" in row
    for dotted in names_in(row):
        path = re.sub(r"^teacher\.", "algorithm.teacher.", dotted)
        path = re.sub(r"\.(values|startswith|split|strip|capabilities\.\w+)$", "", path)
        if dotted in WORDS or dotted in GIVEN or dotted == "mesh.context" or path in COMPUTED or path in named_by(row):
            continue
        if path.startswith("config."):
            assert hasattr(LachesisConfig, path.removeprefix("config."))
        else:
            assert find_keys(path) or find_section(path), f"{name} names {dotted}"


def test_what_does_not_hold_says_nothing():
    config = LachesisConfig.model_validate({"model": {"path": "m"}, "run": {"steps": 1}})
    assert [said for name in table.rows() for said in table.rule(name)(config) if said[0] == "problem"] == []


def kinds(name: str) -> list[Any]:
    """Return a section of each kind with its defaults; what is required is left out, as no condition may need it."""
    found = [kind.model_construct() for kind in get_args(LachesisConfig.model_fields[name].annotation)]
    assert len(found) > 1
    return found


def teachers() -> list[TeacherConfig | None]:
    """Return no teacher and one of each kind."""
    kinds = get_args(TeacherConfig.model_fields["kind"].annotation)
    return [None, *(TeacherConfig.model_construct(kind=kind) for kind in kinds)]


@pytest.mark.parametrize(("name", "row"), ROWS + REFUSALS)
def test_a_condition_asks_no_section_for_a_key_that_it_lacks(name: str, row: dict[str, Any]):
    config = LachesisConfig.model_validate({"model": {"path": "m"}, "run": {"steps": 1}})
    given = GIVEN | {"mesh": derive_mesh(config.distributed, ranks=2)}
    words = set(re.findall(r"[a-z_]+", row["when"]))
    choices = [
        kinds(part) if words & {part, "config"} else [None] for part in ("source", "engine", "bridge", "adapter")
    ]
    for source, engine, bridge, adapter in itertools.product(*choices):
        parts = {"source": source, "engine": engine, "bridge": bridge, "adapter": adapter}
        other = config.model_copy(update={part: chosen for part, chosen in parts.items() if chosen is not None})
        for teacher in teachers():
            names = table.names_of(other) | {"teacher": teacher} | given
            assert table.holds(row["when"], names) in (True, False), name
