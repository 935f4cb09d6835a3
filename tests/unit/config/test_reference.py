"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from lachesis.config.keys import all_keys
from lachesis.plugins.dialects import DIALECTS
from tests.paths import DOCS

GENERATOR = DOCS / "generate_reference.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_reference_is_up_to_date(generator):
    committed = GENERATOR.with_name("configuration.md").read_text(encoding="utf-8")
    assert committed == generator.render(), "run: python docs/generate_reference.py"


def test_the_committed_migration_page_and_its_keys_are_up_to_date(generator):
    for file, made in ((generator.MIGRATION, generator.render_migration()), (generator.KEYS, generator.render_keys())):
        assert file.read_text(encoding="utf-8") == made, "run: python docs/generate_reference.py"


def test_every_name_of_another_trainer_can_be_searched(generator):
    keys = {(trainer, name) for trainer, name, *_ in json.loads(generator.render_keys())}
    assert keys == {(dialect.name, f"{dialect.prefix}{name}") for dialect in DIALECTS for name in dialect.entries}


def test_every_key_has_a_row(generator):
    page = generator.render()
    sections = dict(part.split("`\n", 1) for part in page.split("\n## `")[1:])
    for key in all_keys():
        assert f"\n`{key.name}` | {generator.type_of(key)} | " in sections[key.section or key.name]


def test_the_required_keys_are_listed(generator):
    page = generator.render()
    assert "**Required** keys are `model.path` and one of `run.steps` and `run.epochs`; with" in page
