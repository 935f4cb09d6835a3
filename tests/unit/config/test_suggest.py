from __future__ import annotations

import pytest

from lachesis.common.errors import nearest
from lachesis.config.suggest import nearest_path, paths_named, unknown_key_hint


@pytest.mark.parametrize(
    ("section", "name", "kind", "hint"),
    [
        ("data", "promt_column", None, "did you mean data.prompt_column?"),
        ("", "epsilon", None, "it belongs to algorithm.epsilon"),
        ("sampling", "max_prompt_length", None, "it belongs to data.max_prompt_length"),
        ("", "optimiser", None, "did you mean optimizer?"),
        ("run", "lerning_rate", None, "did you mean optimizer.learning_rate?"),
        ("adapter", "r", "none", "it belongs to adapter.kind: lora, and here that is none"),
        ("adapter", "alfa", "lora", "did you mean adapter.alpha?"),
        ("rewards", "wandb", None, "it belongs to logging.wandb"),
        ("", "run.steps", None, "write steps in a line below run:, indented"),
        ("", "run.stepz", None, "did you mean run.steps?"),
        ("batch", "qqq", None, "batch has prompts_per_step, max_tokens_per_microbatch, micro_batch_size"),
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
