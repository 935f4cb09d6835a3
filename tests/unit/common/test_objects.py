from __future__ import annotations

import gc

import pytest

from lachesis.common.errors import ConfigError
from lachesis.common.imports import load_function
from lachesis.common.objects import NamedObjects, names_object, object_named


def right():
    """A reward, say."""


def test_an_object_is_found_under_its_name():
    giving = NamedObjects()
    spec = giving.give("right", right)
    assert names_object(spec)
    assert spec.endswith(".right")
    assert object_named(spec) is right
    assert load_function(spec) is right


def test_the_same_object_has_one_name_and_others_have_others():
    giving = NamedObjects()
    names = [giving.give("f", value) for value in (right, [1], right, [1])]
    assert names[0] == names[2]
    assert len(set(names)) == 3
    assert names[1].endswith(".f_2")
    assert NamedObjects().give("f", right) != names[0], "another call"


def test_what_has_no_name_gets_one():
    assert NamedObjects().give("<lambda>", lambda: None).endswith(".lambda")


def test_it_is_forgotten_with_the_call():
    giving = NamedObjects()
    spec = giving.give("rows", [1])
    del giving
    gc.collect()
    with pytest.raises(ConfigError, match="this process does not have it -> pass it again"):
        object_named(spec)


@pytest.mark.parametrize("spec", ["given.right", "module.function", "given.py:right"])
def test_names_of_files_and_modules_are_none(spec: str):
    assert not names_object(spec)
