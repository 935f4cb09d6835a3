"""The fields of a body: their types, and what is said of those that are wrong."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from lachesis.engines.serving.bodies import (
    SINGLE,
    Flag,
    Number,
    Refused,
    Request,
    Text,
    TokenIds,
    Whole,
    parse,
    parse_object,
)


def test_bodies_are_json_objects():
    assert parse_object(b"") == parse_object(b" \n") == {}
    assert parse_object('{"a": "é"}'.encode()) == {"a": "é"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]", "not a JSON object"), (b"3", "not a JSON object"), (b"{", "line 1 column 1"), (b"\xff", "not JSON"),
        (b'{"a": "\xff"}', "unicode.* line 1 column 8"), (b'{"a": NaN}', "value at line 1 column 7"),
        (b'{"a": -Infinity}', "number at line 1 column 8"), (b"[" * 99_999, "recursion"),
        (b'{"a": ' + b"9" * 9999 + b"}", "number out of range"),
    ],
)  # fmt: skip
def test_other_bodies_are_refused(raw, message):
    with pytest.raises(Refused, match=message) as caught:
        parse_object(raw)
    assert caught.value.status == 400 and caught.value.remedy


class Fields(Request):
    aliases: ClassVar = {"other": "text"}
    also = ("ignored",)

    text: Text
    whole: Annotated[Whole, Field(ge=1, le=2)] = 1
    number: Number = 0.5
    flag: Flag = False
    choice: Literal["a", "b"] = "a"
    ids: TokenIds = ()
    texts: Annotated[tuple[Text, ...], SINGLE] = ()
    mapping: dict[str, int] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("text", 3, "a valid string"), ("text", "", "at least 1"), ("text", "a\0", "NUL"),
        ("whole", True, "a valid integer"), ("whole", 1.5, "a valid integer"), ("whole", "1", "a valid integer"),
        ("whole", 0, "equal to 1"), ("whole", 3, "equal to 2"), ("number", "1", "a valid number"),
        ("number", True, "a valid number"), ("number", 1e999, "finite"), ("flag", 1, "a valid boolean"),
        ("ids.1", [1, True], "a valid integer"), ("ids.0", [-1], "equal to 0"), ("ids", "12", "a valid tuple"),
        ("texts.1", ["a", 1], "a valid string"), ("choice", ["a"], "'a' or 'b'"), ("mapping", [], "a valid dictionary"),
    ],
)  # fmt: skip
def test_fields_of_a_wrong_type_are_refused(name, value, wanted):
    with pytest.raises(Refused, match=wanted) as caught:
        parse(Fields, {"text": "x"} | {name.partition(".")[0]: value}, where="outer")
    assert f"'outer.{name}'" in caught.value.message and caught.value.status == 400 and caught.value.remedy


def test_what_is_null_is_as_if_it_were_not_there():
    fields = parse(Fields, {"text": "x", "whole": None, "ids": [1, 2], "texts": "one", "ignored": object()})
    assert (fields.whole, fields.ids, fields.texts) == (1, (1, 2), ("one",))
    for nothing in ({}, {"text": None}):
        with pytest.raises(Refused, match="'text' is missing"):
            parse(Fields, nothing)


def test_an_alias_is_the_field():
    assert parse(Fields, {"other": "x"}).text == "x"
    with pytest.raises(Refused, match="both text and other"):
        parse(Fields, {"other": "x", "text": "y"})


def test_an_unknown_field_is_told_its_neighbour():
    with pytest.raises(Refused, match=r"unknown field 'lora\.wohle'") as caught:
        parse(Fields, {"wohle": 1}, where="lora")
    assert "did you mean whole?" in caught.value.remedy
    with pytest.raises(Refused, match="unknown field 'zzz'") as caught:
        parse(Fields, {"zzz": 1})
    assert "known fields: choice, flag" in caught.value.remedy
