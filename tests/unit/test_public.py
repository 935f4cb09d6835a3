"""What `import lachesis` offers: the names, where they come from, and what they cost."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

import lachesis
from lachesis.common.renamed import RENAMED
from tests.paths import PACKAGE, ROOT


@pytest.mark.parametrize("name", lachesis.__all__)
def test_each_name_is_there_and_on_the_page(name: str):
    assert getattr(lachesis, name) is not None
    assert f"`{name}`" in (ROOT / "docs" / "python.md").read_text().rpartition("## All names")[2]


def test_there_are_no_others():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lachesis.trian  # type: ignore[attr-defined]  # noqa: B018


def test_importing_it_loads_neither_torch_nor_a_room():
    code = "import sys, lachesis; print(sorted(n for n in sys.modules if n in ('torch', 'pydantic', 'yaml', 'rich')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_train_is_a_function_and_the_room():
    import_module("lachesis.train.policy")  # which sets the attribute of the package
    assert callable(lachesis.train)
    assert lachesis.train.policy.Policy is lachesis.Policy  # type: ignore[attr-defined]


def test_the_package_says_that_it_has_types():
    assert (PACKAGE / "py.typed").is_file()


def test_what_was_renamed_is_in_the_table():
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \|", (ROOT / "docs" / "deprecations.md").read_text(), re.MULTILINE)
    assert dict(rows) == RENAMED
