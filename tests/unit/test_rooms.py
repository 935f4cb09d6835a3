"""The rooms of the architecture: imports point down, and what may live where."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import lachesis
from tests.paths import PACKAGE

# From the top down, as the package's docstring lists them.
ROOMS = (lachesis.__doc__ or "").strip().rpartition(":\n")[2].rstrip(".").split(", ")
# What any room may import, wherever it stands.
ANYWHERE = ("config.schema",)
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> int:
    """Its place from the top; the package's own two files are above all rooms."""
    name = module.split(".")[0]
    return -1 if name in ("__init__", "__main__") else ROOMS.index(name)


def anywhere(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in ANYWHERE)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> list[str]:
    """Modules of this package that a file imports, without the package's name."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lachesis"):
            base = (node.module or "").removeprefix("lachesis").lstrip(".")
            found += [base or alias.name for alias in node.names]
    return [module for module in found if module != "__version__"]


def folders(path: Path) -> list[Path]:
    return [entry for entry in sorted(path.iterdir()) if entry.is_dir() and any(entry.glob("*.py"))]


def test_the_rooms_are_the_folders():
    assert {entry.name for entry in folders(PACKAGE)} == set(ROOMS)
    assert {entry.name for entry in PACKAGE.iterdir() if entry.is_file()} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    upward = [m for m in imports(path) if not anywhere(m) and room_of(m) < room_of(own)]
    assert not upward, f"{own} imports {upward} from rooms above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_prints_or_exits(path):
    calls = {
        node.func.id if isinstance(node.func, ast.Name) else f"{getattr(node.func.value, 'id', '')}.{node.func.attr}"
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }
    if path.parent.name != "cli":
        assert not calls & {"print", "sys.exit", "exit", "os._exit"}


def test_the_loop_knows_no_concrete_class():
    loop = imports(PACKAGE / "train" / "loop.py")
    assert not [m for m in loop if m.split(".")[0] in ("engines", "rollouts") or "in_process" in m or "single" in m]


def test_losses_and_advantages_are_pure_tensor_functions():
    records = {"common.errors", "common.types", "config.schema"}
    for name in ("loss", "advantage", "ratios"):
        modules = imports(PACKAGE / "train" / "losses" / f"{name}.py")
        assert all(m in records or m.startswith("train.losses.") for m in modules), (name, modules)
