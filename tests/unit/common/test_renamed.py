"""What users import by the names of version 0.1."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from lachesis.common.renamed import RENAMED, keep_old_names


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_the_same_module(old):
    sys.modules.pop(old, None)
    new = import_module(RENAMED[old])
    with pytest.warns(DeprecationWarning, match=f"{old} is now {RENAMED[old]}"):
        assert import_module(old) is new
    assert new.__name__ == RENAMED[old] and new.__spec__.name == RENAMED[old]


@pytest.mark.parametrize(
    ("public", "place"),
    [
        ("lachesis.plugins.atropos.environments.base", "lachesis.plugins.atropos.environments.base"),
        (
            "lachesis.plugins.atropos.environments.shipped.calculator",
            "lachesis.plugins.atropos.environments.shipped.calculator",
        ),
        ("lachesis.plugins.environments.agents.rewards", "lachesis.plugins.environments.agents.rewards"),
        ("lachesis.plugins.sandbox.rewards.grpo_code", "lachesis.plugins.sandbox.rewards.grpo_code"),
        ("lachesis.plugins.sandbox.rewards.grpo_code.rewards", "lachesis.plugins.sandbox.rewards.grpo_code.rewards"),
    ],
)
def test_a_public_name_is_the_same_module(public, place):
    assert import_module(public) is import_module(place)
    assert import_module(place).__name__ == place


def test_a_module_that_a_public_package_has_not_is_missed_by_its_public_name():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'lachesis\.environments\.nothing'"):
        import_module("lachesis.environments.nothing")


def test_names_are_taken_from_it():
    from lachesis.errors import ConfigError as Old

    from lachesis.common.errors import ConfigError

    assert Old is ConfigError


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("lachesis.rundir")


def test_names_are_kept_once():
    before = list(sys.meta_path)
    keep_old_names()
    assert sys.meta_path == before
