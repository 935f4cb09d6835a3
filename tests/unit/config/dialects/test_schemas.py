"""The tables against the classes that other trainers read their files into."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lachesis.config.dialects.axolotl_names import AXOLOTL
from lachesis.config.dialects.table import Dialect
from lachesis.config.dialects.trl import TRL
from tests.schemas.names import TARGET, class_fields

NAMES: Mapping[str, list[str]] = json.loads(TARGET.read_text(encoding="utf-8"))["classes"]
DIALECTS: Mapping[str, Dialect] = {"trl": TRL, "axolotl": AXOLOTL}


@pytest.mark.parametrize("label", NAMES)
def test_every_field_of_theirs_is_in_a_table(label):
    dialect, _, rest = label.partition(":")
    prefix = rest[: rest.rfind(".") + 1]  # of a section
    known = DIALECTS[dialect]
    names = [f"{prefix}{name}" for name in NAMES[label]]
    missing = [n for n in names if n not in known.entries and not known.is_section(n) and n not in known.row_sections]
    assert not missing


def test_the_list_is_that_of_the_installed_transformers():
    transformers = pytest.importorskip("transformers")
    file = Path(inspect.getfile(transformers)).with_name("training_args.py")
    assert NAMES["trl:TrainingArguments"] == class_fields([file], "TrainingArguments")
