"""``--set a.b=c``: what it writes over the data of a file, and what it cannot."""

from __future__ import annotations

import pytest

from lachesis.config.document import parse_document
from lachesis.config.overrides import apply_overrides


def parse(text: str):
    return parse_document(text, name="c.yaml")


def test_overrides_are_yaml_and_the_last_wins():
    document = parse("a:\n  b: 1\n")
    apply_overrides(document, ["a.b=2", "a.b=3", "new.key=[x, 1e-3]", "a.c=p=q", "a.d="])
    assert document.data == {"a": {"b": 3, "c": "p=q", "d": None}, "new": {"key": ["x", 1e-3]}}
    assert document.problems == []
    assert document.at(("a", "b")) == " (--set a.b)"
    assert document.at(("new", "other")) == " (--set new.key)"


def test_an_override_replaces_a_section_with_its_places():
    document = parse("a:\n  b: 1\n")
    apply_overrides(document, ["a={c: 2}"])
    assert document.data == {"a": {"c": 2}}
    assert document.at(("a", "b")) == " (--set a)"


def test_an_override_fills_a_section_that_was_null():
    document = parse("a: null\n")
    apply_overrides(document, ["a.b=1"])
    assert document.data == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("one[0]=z", {"one": ["z"]}),
        ("one.0=z", {"one": ["z"]}),
        ("one[1]=z", {"one": ["x", "z"]}),
        ("rows[0].b=2", {"rows": [{"a": 1, "b": 2}]}),
        ("rows.b=2", {"rows": [{"a": 1, "b": 2}]}),
        ("rows[1].a=2", {"rows": [{"a": 1}, {"a": 2}]}),
        ("new[0].a=2", {"new": [{"a": 2}]}),
        ("listed.a=2", {"listed": [{"a": 2}]}),
        ("deep.rows.a.b=2", {"deep": {"rows": [{"a": {"b": 2}}]}}),
    ],
)
def test_overrides_reach_into_lists(override, expected):
    document = parse_document("one: [x]\nrows: [{a: 1}]\ndeep: {rows: [{}]}\n", name="c.yaml")
    apply_overrides(document, [override], row_sections=("listed",))
    assert not document.problems
    assert {key: document.data[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b", "--set a.b: expected section.key=value"),
        ("=3", "--set =3: expected section.key=value"),
        ("a..b=3", "--set a..b=3: expected section.key=value"),
        ("a.b=[1", "not valid YAML"),
        ("a.b.c=1", "--set a.b.c: a.b (line 2) is the number 1 and has no keys"),
        ("a[0]=1", "--set a[0]: a (line 1) is a mapping {'b': 1}, not a list"),
    ],
)
def test_overrides_that_cannot_be_applied(override, expected):
    document = parse("a:\n  b: 1\n")
    apply_overrides(document, [override])
    assert len(document.problems) == 1
    assert expected in document.problems[0]
    assert document.data == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rows[3].a=1", "--set rows[3].a: rows (line 1) is too short for that index; the next item is [2]"),
        ("rows.a=1", "--set rows.a: rows (line 1) is a list; write the item: rows[0].a"),
        ("rows[0][0]=1", "--set rows[0][0]: rows[0] (line 1) is a mapping {'a': 1}, not a list"),
    ],
)
def test_overrides_of_lists_that_cannot_be_applied(override, expected):
    document = parse("rows: [{a: 1}, {a: 2}]\n")
    apply_overrides(document, [override])
    assert document.problems == [expected]
    assert document.data == {"rows": [{"a": 1}, {"a": 2}]}
