"""Modules that users import by their public names."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from lachesis.plugins.public_names import find_public_names


@pytest.mark.parametrize(
    ("public", "place"),
    [
        ("lachesis.environments.base", "lachesis.plugins.atropos.environments.base"),
        ("lachesis.environments.shipped.gsm8k", "lachesis.plugins.atropos.environments.shipped.gsm8k"),
        ("lachesis.rollouts.agent.rewards", "lachesis.plugins.environments.agents.rewards"),
        ("lachesis.rollouts.rewards.grpo_code", "lachesis.plugins.sandbox.rewards.grpo_code"),
        ("lachesis.rollouts.rewards.reasoning_gym", "lachesis.plugins.environments.reasoning_gym"),
        ("lachesis.rollouts.rewards.registry", "lachesis.rollouts.rewards.built_in"),
        ("lachesis.rollouts.rewards.grpo_code.rewards", "lachesis.plugins.sandbox.rewards.grpo_code.rewards"),
    ],
)
def test_a_public_name_is_the_same_module(public, place):
    assert import_module(public) is import_module(place)
    assert import_module(place).__name__ == place


def test_a_module_that_a_public_package_has_not_is_missed_by_its_public_name():
    with pytest.raises(ModuleNotFoundError, match=r"No module named .lachesis.environments.nothing"):
        import_module("lachesis.environments.nothing")


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("lachesis.rundir")


def test_names_are_kept_once():
    before = list(sys.meta_path)
    find_public_names()
    assert sys.meta_path == before
