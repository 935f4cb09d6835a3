"""JSON that others wrote, who may write anything."""

from __future__ import annotations

import pytest

from lachesis.common.json_values import DEEPEST, read_json


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("text", ["{", "", "{a: 1}"])
def test_what_is_no_json_is_a_value_error(text: str):
    with pytest.raises(ValueError):
        read_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        nested(200_000),
        nested(DEEPEST + 1),
        '{"a":' * DEEPEST + "[]" + "}" * DEEPEST,
    ],
    ids=["lists that go on", "objects that go on", "lists", "one list too many", "a list in objects"],
)
def test_so_is_what_is_nested_too_deeply(text: str):
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        read_json(text)


def test_other_json_is_read():
    assert read_json('{"a": [1, {"b": null}], "c": {}}') == {"a": [1, {"b": None}], "c": {}}
    assert read_json(b"7") == 7
    assert str(read_json(nested(DEEPEST))) == nested(DEEPEST)
