"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import importlib.util
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


def test_the_committed_migration_page_is_up_to_date(generator):
    committed = GENERATOR.with_name("migration.md").read_text(encoding="utf-8")
    assert committed == generator.render_migration(), "run: python docs/generate_reference.py"


def test_every_name_of_another_trainer_has_a_row(generator):
    page = generator.render_migration()
    for dialect in DIALECTS:
        for name in dialect.entries:
            assert f"| `{dialect.prefix}{name}` | " in page


def test_every_key_has_a_row(generator):
    page = generator.render()
    sections = dict(part.split("`\n", 1) for part in page.split("\n## `")[1:])
    for key in all_keys():
        assert f"| `{key.name}` | {key.type} |" in sections[key.section]


def test_the_required_keys_are_listed(generator):
    page = generator.render()
    assert "**Required** keys are `model.path` and one of `run.steps` and `run.epochs`; with" in page
