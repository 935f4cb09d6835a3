"""Each row of rules.toml says something, of keys that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter
from typing import Any

import pytest

from lachesis.common.types import LEVELS
from lachesis.config.keys import find_keys, find_section
from lachesis.config.rules import table
from lachesis.config.schema import LachesisConfig

RULES, DISTRIBUTED = table.rows(), table.rows("distributed")
ROWS = [(name, row) for rows in (RULES, DISTRIBUTED) for name, some in rows.items() for row in some]
# Of the configuration itself, and of sections beside their keys: what they compute.
COMPUTED = {
    "engine.place",
    "engine.rounds",
    "engine.servers_on_own_card",
    "model.sees_images",
    "algorithm.holds_reference",
    "algorithm.model_fields_set",
    "data.evaluates",
}
WORDS = {"changed", "listed", "do", "key", "shared_key", "uses", "prompts", "counted"}
# What conditions of distributed.toml have beside.
WORDS |= {"ranks", "context", "sharded", "here", "gpus"}


def names_in(row: dict[str, Any]) -> Iterator[str]:
    """Yield the names of a row: the dotted ones in its expressions without texts, and those in its lists and texts."""
    let = row.get("let", {})
    for text in (row["when"], *let.values()):
        yield from re.findall(r"(?<![\w.])[a-z]\w*(?:\.\w+)+", re.sub(r"'[^']*'|\"[^\"]*\"", "", text))
    yield from (*row.get("changed", ()), *row.get("each", ()))
    for text in (row[part] for part in (*LEVELS, "remedy") if part in row):
        for _, name, _, _ in Formatter().parse(text):
            if name and name not in let:
                yield name.partition("[")[0]


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_row_names_keys_that_there_are(name: str, row: dict[str, Any]):
    assert [level for level in LEVELS if level in row] == [*row.keys() - {"when", "let", "changed", "each", "remedy"}]
    for dotted in names_in(row):
        path = re.sub(r"^teacher\.", "algorithm.teacher.", dotted)
        path = re.sub(r"\.(values|startswith|split|strip|capabilities\.\w+)$", "", path)
        if dotted in WORDS or path in COMPUTED:
            continue
        if path.startswith("config."):
            assert hasattr(LachesisConfig, path.removeprefix("config."))
        else:
            assert find_keys(path) or find_section(path), f"{name} names {dotted}"


def test_what_does_not_hold_says_nothing():
    config = LachesisConfig.model_validate({"model": {"path": "m"}, "run": {"steps": 1}})
    assert [said for name in RULES for said in table.rule(name)(config) if said[0] == "problem"] == []
