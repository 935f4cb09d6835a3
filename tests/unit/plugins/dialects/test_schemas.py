"""The tables against the classes that other trainers read their files into."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lachesis.config.document import Document
from lachesis.config.load import load_document
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.dialects.axolotl import AXOLOTL
from lachesis.plugins.dialects.defaults import DIFFERENT, IN_CODE
from lachesis.plugins.dialects.table import Dialect
from lachesis.plugins.dialects.trl import RLOO, TRL
from tests.schemas.names import TARGET, class_fields

NAMES: Mapping[str, list[str]] = json.loads(TARGET.read_text(encoding="utf-8"))["classes"]
DIALECTS: Mapping[str, Dialect] = {"trl": TRL, "axolotl": AXOLOTL}
TABLES: Mapping[str, Dialect] = {**DIALECTS, "rloo": RLOO}


@pytest.mark.parametrize("label", NAMES)
def test_every_field_of_theirs_is_in_a_table(label):
    dialect, _, rest = label.partition(":")
    prefix = rest[: rest.rfind(".") + 1]  # of a section
    known = TABLES[dialect]
    names = [f"{prefix}{name}" for name in NAMES[label]]
    missing = [n for n in names if n not in known.entries and not known.is_section(n) and n not in known.row_sections]
    assert not missing


def test_the_list_is_that_of_the_installed_transformers():
    transformers = pytest.importorskip("transformers")
    file = Path(inspect.getfile(transformers)).with_name("training_args.py")
    assert NAMES["trl:TrainingArguments"] == class_fields([file], "TrainingArguments")


FILES: Mapping[str, list[dict[str, Any]]] = {
    "trl": [
        {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a.b"], **more}
        for more in ({}, {"use_vllm": True, "vllm_mode": "server"}, {"use_vllm": True}, {"use_peft": True})
    ],
    "axolotl": [
        {
            **{"base_model": "m", "rl": "grpo", "datasets": [{"path": "d"}], "micro_batch_size": 8},
            "trl": {"reward_funcs": ["a.b"], "num_generations": 8, **more},
        }
        for more in ({}, {"use_vllm": True}, {"use_vllm": True, "vllm_mode": "colocate"})
    ],
}
# The names of one thing, and what no file can leave out; a server of the run's own has no port there.
SAME = {"model_revision": "main", "vllm.port": 8000}


def become(data: dict[str, Any]) -> LachesisConfig:
    return load_document(Document("c.yaml", data), base_dir=Path("/")).config


def written(data: dict[str, Any], name: str, value: object) -> dict[str, Any] | None:
    """The file with the key; None where it has it already."""
    data = copy.deepcopy(data)
    section, (*folders, last) = data, name.split(".")
    for folder in folders:
        section = section.setdefault(folder, {})
    return (
        None
        if last in section
        else section | {last: value}
        if section is data
        else data | {folders[0]: section | {last: value}}
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_not_written_has_their_default_or_is_on_the_page(dialect):
    defaults: dict[str, object] = {}
    for label, fields in json.loads(TARGET.read_text(encoding="utf-8"))["defaults"].items():
        place, _, rest = label.partition(":")
        if place == dialect and not rest.startswith(("datasets.", "open_r1_")):
            defaults |= {rest[: rest.rfind(".") + 1] + name: value for name, value in fields.items()}
    different: set[str] = set()
    for data in FILES[dialect]:
        plain = become(data)
        for name, value in defaults.items():
            changed = written(data, name, value)
            if value is not None and changed is not None and SAME.get(name) != value and become(changed) != plain:
                different.add(name)
    listed = DIFFERENT[DIALECTS[dialect].name]
    assert different == set(listed)
    assert {name: found.written for name, found in listed.items()} == {
        name: str(defaults[name]).lower() if defaults[name] in (True, False) else str(defaults[name]) for name in listed
    }


@pytest.mark.parametrize("more", [{}, {"use_vllm": True}, {"use_vllm": True, "vllm_mode": "server"}])
def test_what_a_file_for_rloo_does_not_write_has_the_default_of_rloo(more: dict[str, Any]):
    file = {**FILES["trl"][0], **more, "trl_trainer": "rloo", "per_device_train_batch_size": 2}
    plain = become(file)
    for name, value in json.loads(TARGET.read_text(encoding="utf-8"))["defaults"]["rloo:RLOOConfig"].items():
        changed = written(file, name, value)
        if value is not None and changed is not None:
            assert become(changed) == plain, name


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_note_names_the_defaults_that_differ_and_what_it_names_takes_them_over(dialect):
    """With all that it says set, nothing is left to be said."""
    for data in FILES[dialect]:
        (note,) = [text for text in said(data) if "with another default here" in text]
        overrides = [part.strip() for part in note.partition("--set ")[2].split("--set ")]
        known = DIFFERENT[DIALECTS[dialect].name].keys() | IN_CODE[DIALECTS[dialect].name].keys()
        assert overrides and {override.partition("=")[0] for override in overrides} <= known
        assert not [text for text in said(data, overrides) if "with another default here" in text]


def test_a_default_of_an_engine_that_a_run_does_not_have_is_not_spoken_of():
    plain, server, colocated = FILES["axolotl"]
    assert not any("vllm.gpu_memory_utilization" in text for text in (*said(plain), *said(server)))
    assert any("vllm.gpu_memory_utilization" in text for text in said(colocated))


def said(data: dict[str, Any], overrides: Sequence[str] = ()) -> list[str]:
    loaded = load_document(Document("c.yaml", copy.deepcopy(data)), base_dir=Path("/"), overrides=overrides)
    return [finding.message for finding in loaded.findings]
