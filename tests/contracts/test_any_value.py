"""Whatever stands in a file, it is translated or refused by our own error."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.document import Document
from lachesis.config.load import validate
from lachesis.plugins.dialects import translate
from lachesis.plugins.dialects.atropos import TRAINER, translate_argv
from lachesis.plugins.dialects.axolotl import AXOLOTL
from lachesis.plugins.dialects.table import Dialect
from lachesis.plugins.dialects.trl import TRL

VALUES = ["text", 3, -1, 0.5, True, [1], ["a"], {"a": 1}, [{"a": 1}], None]
REQUIRED = {
    "axolotl": {"base_model": "m", "rl": "grpo", "datasets": [{"path": "d"}], "max_steps": 8, "micro_batch_size": 8},
    "trl": {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a.b"], "max_steps": 8},
}
SET_NOTHING = ("nothing", "cannot", "refused")
VARIANTS = [{}, {"use_vllm": True, "vllm_mode": "colocate", "async_prefetch": True}]


def nested(name: str, value: object) -> dict:
    head, dot, rest = name.partition(".")
    return {head: nested(rest, value)} if dot else {head: value}


def merged(base: dict, over: dict) -> dict:
    return {**base, **{key: over_one(base.get(key), value) for key, value in over.items()}}


def over_one(base: object, value: object) -> object:
    """A field of a list's items is one of its first."""
    if isinstance(value, dict) and isinstance(base, list) and isinstance(base[0], dict):
        return [merged(base[0], value), *base[1:]]
    return merged(base, value) if isinstance(value, dict) and isinstance(base, dict) else value


def example(kind: str, variant: dict) -> dict:
    if kind == "axolotl":
        return {**REQUIRED[kind], "trl": {"reward_funcs": ["a.b"], **variant}}
    return {**REQUIRED[kind], **{key: value for key, value in variant.items() if key != "async_prefetch"}}


@pytest.mark.parametrize(("dialect", "kind"), [(AXOLOTL, "axolotl"), (TRL, "trl")])
@pytest.mark.parametrize("variant", VARIANTS, ids=["embedded", "colocate"])
def test_a_value_of_any_kind(dialect: Dialect, kind, variant):
    base = example(kind, variant)
    setting = [name for name, entry in dialect.entries.items() if entry.treatment not in SET_NOTHING]
    seen: set[str] = set()
    for name in [*setting, *dialect.top_level]:
        for value in VALUES:
            data = merged(base, nested(name, value))
            try:
                document = translate(Document(name="x", data=data), dialect=kind).document
                if (translated := repr(document.data)) in seen:
                    continue
                seen.add(translated)
                config = validate(document)
            except ConfigError as error:
                assert "Traceback" not in error.message
            else:
                assert config.run.steps or config.run.epochs


@pytest.mark.parametrize(("dialect", "kind"), [(AXOLOTL, "axolotl"), (TRL, "trl")])
def test_a_value_of_any_kind_of_what_sets_nothing(dialect: Dialect, kind):
    base = example(kind, {})
    plain = translate(Document(name="x", data=base), dialect=kind).document.data
    for name in [name for name, entry in dialect.entries.items() if entry.treatment in SET_NOTHING]:
        for value in VALUES:
            try:
                found = translate(Document(name="x", data=merged(base, nested(name, value))), dialect=kind)
            except ConfigError as error:
                assert "Traceback" not in error.message
            else:
                assert found.document.data == plain, (name, value)


def test_a_flag_of_any_value():
    for name in TRAINER.entries:
        for value in ("text", "''", "3", "-1", "0.5", "true", "[1]", "{a: 1}", "null", ": :"):
            try:
                validate(translate_argv(["--model-name", "m", f"--{name}", value]).document)
            except ConfigError as error:
                assert error.message


@pytest.mark.parametrize("name", ["datasets", "test_datasets"])
@pytest.mark.parametrize("value", [{"path": "d"}, "d", 3])
def test_a_list_that_is_none_is_refused(name, value):
    data = {**REQUIRED["axolotl"], name: value, "trl": {"reward_funcs": ["a.b"]}}
    with pytest.raises(ConfigError, match=f"{name}: expected a list"):
        validate(translate(Document(name="x", data=data), dialect="axolotl").document)
