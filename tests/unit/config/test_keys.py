from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from lachesis.config.keys import all_keys, all_sections, find_keys, find_section, type_in_words
from lachesis.config.schema import LachesisConfig


class Small(BaseModel):
    """A small variant."""

    kind: Literal["small"] = "small"
    size: int = Field(1, description="How small.")
    shared: bool = Field(True, description="Common.")


class Large(BaseModel):
    """A large variant."""

    kind: Literal["large"] = "large"
    size: int = Field(100, description="How large.")
    shared: bool = Field(True, description="Common.")


class Inner(BaseModel):
    """Inside."""

    name: str = Field(description="A name.")


class Outer(BaseModel):
    """Outside."""

    inner: Inner | None = Field(None, description="Optional.")


class Tree(BaseModel):
    """A tree for tests."""

    variant: Annotated[Small | Large, Field(discriminator="kind")] = Field(default_factory=Small)
    outer: Outer = Field(default_factory=Outer)


def test_every_key_of_the_schema_has_a_sentence():
    assert [key.path for key in all_keys() if not key.description] == []
    assert [section.path for section in all_sections() if not section.description] == []


def test_sections_come_in_the_order_of_the_schema():
    paths = [section.path for section in all_sections() if "." not in section.path]
    assert paths == ["", *LachesisConfig.model_fields]


def test_a_key_of_the_schema():
    (key,) = find_keys("optimizer.learning_rate")
    assert (key.section, key.name) == ("optimizer", "learning_rate")
    assert key.type == "number > 0 or null"
    assert key.default == "unset"
    (required,) = find_keys("model.path")
    assert required.default is None


def test_variants_share_keys_that_are_equal_and_keep_apart_those_that_are_not():
    section = find_section("variant", Tree)
    assert section is not None
    assert section.discriminated
    assert (section.kinds, section.default_kind) == (("small", "large"), "small")
    assert section.description == "`small`: A small variant. `large`: A large variant."
    assert [(key.name, key.default, key.kinds) for key in section.keys] == [
        ("kind", "small", ()),
        ("size", "1", ("small",)),
        ("shared", "true", ()),
        ("size", "100", ("large",)),
    ]
    assert len(find_keys("variant.size", Tree)) == 2


def test_a_nested_optional_section():
    outer, inner = find_section("outer", Tree), find_section("outer.inner", Tree)
    assert outer is not None and outer.subsections == ("inner",) and outer.keys == ()
    assert inner is not None and [key.path for key in inner.keys] == ["outer.inner.name"]
    assert find_section("inner", Tree) is None


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (Annotated[int, Field(ge=1)], "whole number >= 1"),
        (Annotated[float, Field(ge=0, le=1)], "number from 0 to 1"),
        (Annotated[float, Field(gt=0, le=1)], "number > 0 and <= 1"),
        (str | None, "text or null"),
        (Literal["a", "b"], "one of a, b"),
        (list[int], "list of whole numbers"),
        (Annotated[list[str], Field(min_length=1)], "non-empty list of text"),
        (tuple[float, float], "list of 2, each number"),
        (tuple[int, str], "list of 2, whole number, text"),
        (dict[str, Any], "mapping"),
        (str | list[str], "text or list of text"),
    ],
)
def test_types_in_words(annotation, words):
    assert type_in_words(annotation) == words


def test_a_type_without_words_is_an_error():
    with pytest.raises(TypeError, match="bytes"):
        type_in_words(bytes)
