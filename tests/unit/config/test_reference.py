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


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load("generate_reference")


@pytest.fixture(scope="module")
def migration() -> ModuleType:
    return load("generate_migration")


def test_the_committed_reference_is_up_to_date(generator):
    committed = GENERATOR.with_name("configuration.md").read_text(encoding="utf-8")
    assert committed == generator.render(), "run: python docs/generate_reference.py"


def test_the_committed_migration_page_and_its_keys_are_up_to_date(migration):
    for file, made in ((migration.MIGRATION, migration.render()), (migration.KEYS, migration.render_keys())):
        assert file.read_text(encoding="utf-8") == made, "run: python docs/generate_migration.py"


def test_the_defaults_of_others_are_compared_with_ours(migration):
    rows = {cells[1]: cells[2:-1] for cells in (row.split("|") for row in migration.compared())}
    assert rows["`algorithm.epsilon_high` with CISPO"] == ["5.0", "0.2", "0.2", "1.2", "–", "–"]
    assert rows["`run.seed`"] == ["0", "42", "42", "", "42", ""]
    assert not rows.keys() & {"`algorithm.epsilon`", "`algorithm.epsilon_high`", "`model.path`"}
    assert migration.changed_by("TRL", "torch_compile") == [("model.compile", "auto")]
    assert migration.changed_by("Axolotl", "logging_steps") == [("logging.every_steps", 1)]


def test_every_name_of_another_trainer_can_be_searched(migration):
    keys = {(trainer, name) for trainer, name, *_ in json.loads(migration.render_keys())}
    assert keys == {(dialect.name, f"{dialect.prefix}{name}") for dialect in DIALECTS for name in dialect.entries}


def test_every_key_has_a_row(generator):
    page = generator.render()
    sections = dict(part.split("`\n", 1) for part in page.split("\n## `")[1:])
    for key in all_keys():
        assert f"\n`{key.name}` | {generator.type_of(key)} | " in sections[key.section or key.name]


def test_the_required_keys_are_listed(generator):
    page = generator.render()
    assert "**Required** keys are `model.path` and one of `run.steps` and `run.epochs`; with" in page
