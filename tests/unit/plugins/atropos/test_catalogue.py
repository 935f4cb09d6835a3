"""The catalogue of installed environments: each name is one that `lachesis env try` takes."""

from __future__ import annotations

import importlib.util

import pytest
import yaml

from lachesis.common.errors import ConfigError
from lachesis.plugins.atropos.catalogue import described, installed
from lachesis.plugins.atropos.commands.environments import run_environment
from lachesis.plugins.atropos.environments.shipped import SHIPPED
from lachesis.plugins.atropos.evaluate import resolve
from tests.paths import EXAMPLES

GUESS = f"{EXAMPLES / 'environments' / 'steps.py'}:Guess"


def test_all_that_are_installed_are_listed_once_and_can_be_resolved():
    listed = installed()
    names = [one.name for one in listed]
    assert len(set(names)) == len(names) and set(SHIPPED) <= set(names)
    for one in listed:
        assert one.kind in ("rollout API", "data", "verifiers", "source")
        if one.kind != "source":
            resolve(one.name)
        if not one.keys.startswith("lachesis run"):
            assert isinstance(yaml.safe_load(one.keys), dict)


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")
def test_the_task_sets_of_verifiers_are_among_them():
    found = {one.name: one for one in installed() if one.kind == "verifiers"}
    assert {"harbor", "nemo_gym", "openenv", "textarena"} <= set(found)
    assert "TextArena" in found["textarena"].about
    assert yaml.safe_load(found["harbor"].keys) == {"source": {"kind": "verifiers", "environment": "harbor"}}


def test_files_and_classes_of_ones_own_are_described():
    assert yaml.safe_load(described(GUESS).keys) == {"source": {"kind": "steps", "environment": GUESS}}
    assert described("arithmetic").keys == "lachesis run --environment arithmetic"
    assert described("mine/sums.py").kind == "verifiers"


def test_an_unknown_one_is_said():
    with pytest.raises(ConfigError, match="there is no environment 'nothing-at-all'"):
        described("nothing-at-all")


def test_the_commands_print_them(capsys: pytest.CaptureFixture[str]):
    assert run_environment("list", "--help", []) == 0
    assert "arithmetic" in capsys.readouterr().out
    assert run_environment("info", GUESS, []) == 0
    printed = capsys.readouterr().out
    assert f"lachesis env try {GUESS}" in printed and "kind: steps" in printed
