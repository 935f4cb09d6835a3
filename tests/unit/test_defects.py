"""Every test that docs/defects.md names exists."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.paths import ROOT

PAGE = ROOT / "docs" / "defects.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| What ")]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def functions_of(file: str) -> set[str]:
    """The test functions of a file below ``tests``, those in classes too; none of a file that is not there."""
    path = ROOT / "tests" / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_row_names_tests_that_exist(row: str):
    _, wrong, right, tests, _ = row.split("|")
    assert wrong.strip() and right.strip()
    named = NAMED.findall(tests)
    assert named and NAMED.sub("", tests).replace(",", "").strip() == "", "the last column has tests and nothing else"
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(file)]
    assert not missing


def test_a_name_that_is_gone_would_be_noticed():
    assert "test_a_name_that_is_gone_would_be_noticed" in functions_of("unit/test_defects.py")
    assert "test_of_nothing" not in functions_of("unit/test_defects.py")
    assert functions_of("unit/no_such_file.py") == set()
