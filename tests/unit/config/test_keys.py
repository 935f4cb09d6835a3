from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from lachesis.common.errors import nearest
from lachesis.config.keys import (
    all_keys,
    all_sections,
    find_keys,
    find_section,
    nearest_path,
    paths_named,
    type_in_words,
    unknown_key_hint,
)
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
    assert paths == ["", *(name for name in LachesisConfig.model_fields if name != "sources")]
    assert [key.path for key in all_keys() if not key.section] == ["sources"]


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


@pytest.mark.parametrize(
    ("section", "name", "kind", "hint"),
    [
        ("data", "promt_column", None, "did you mean data.prompt_column?"),
        ("", "epsilon", None, "it belongs to algorithm.epsilon"),
        ("sampling", "max_prompt_length", None, "it belongs to data.max_prompt_length"),
        ("", "optimiser", None, "did you mean optimizer?"),
        ("run", "lerning_rate", None, "did you mean optimizer.learning_rate?"),
        ("adapter", "r", "none", "it belongs to adapter.kind: lora, but kind is none"),
        ("adapter", "alfa", "lora", "did you mean adapter.alpha?"),
        ("rewards", "wandb", None, "it belongs to logging.wandb"),
        ("", "run.steps", None, "write steps on a line below run:, indented"),
        ("", "run.stepz", None, "did you mean run.steps?"),
        (
            "batch",
            "qqq",
            None,
            "batch has prompts_per_step, steps_per_generation, max_tokens_per_microbatch, micro_batch_size",
        ),
    ],
)
def test_hints(section, name, kind, hint):
    assert unknown_key_hint(section=section, name=name, kind=kind) == hint


def test_keys_of_other_kinds_are_not_suggested():
    assert "alpha" not in unknown_key_hint(section="adapter", name="qqq", kind="none")


def test_a_name_that_several_sections_have():
    assert paths_named("every_steps") == [
        "bridge.every_steps",
        "evaluation.every_steps",
        "checkpoint.every_steps",
        "logging.every_steps",
    ]
    assert paths_named("") == []


def test_nearest_is_none_where_nothing_is_near():
    assert nearest("zzz", ["abc"]) is None
    assert nearest_path("zzzzzz") is None
    assert nearest_path("optimizer.lr_rate") == "optimizer.learning_rate"
