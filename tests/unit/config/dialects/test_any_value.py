"""Whatever stands in a file, it is translated or refused by our own error."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.dialects import translate
from lachesis.config.dialects.atropos import TRAINER, translate_argv
from lachesis.config.dialects.axolotl_names import AXOLOTL
from lachesis.config.dialects.table import Dialect
from lachesis.config.dialects.trl import TRL
from lachesis.config.document import Document
from lachesis.config.load import validate

VALUES = ["text", 3, -1, 0.5, True, [1], ["a"], {"a": 1}, [{"a": 1}], None]
REQUIRED = {
    "axolotl": {"base_model": "m", "rl": "grpo", "datasets": [{"path": "d"}], "max_steps": 8, "micro_batch_size": 8},
    "trl": {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a.b"], "max_steps": 8},
}
VARIANTS = [{}, {"use_vllm": True, "vllm_mode": "colocate", "async_prefetch": True}]


def nested(name: str, value: object) -> dict:
    head, dot, rest = name.partition(".")
    return {head: nested(rest, value)} if dot else {head: value}


def merged(base: dict, over: dict) -> dict:
    return {
        **base,
        **{
            key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in over.items()
        },
    }


@pytest.mark.parametrize(("dialect", "kind"), [(AXOLOTL, "axolotl"), (TRL, "trl")])
@pytest.mark.parametrize("variant", VARIANTS, ids=["embedded", "colocate"])
def test_a_value_of_any_kind(dialect: Dialect, kind, variant):
    if kind == "axolotl":
        base = {**REQUIRED[kind], "trl": {"reward_funcs": ["a.b"], **variant}}
    else:
        base = {**REQUIRED[kind], **{key: value for key, value in variant.items() if key != "async_prefetch"}}
    for name in [*dialect.entries, *dialect.top_level]:
        for value in VALUES:
            data = merged(base, nested(name, value))
            try:
                config = validate(translate(Document(name="x", data=data), dialect=kind).document)
            except ConfigError as error:
                assert "Traceback" not in error.message
            else:
                assert config.run.steps or config.run.epochs


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
