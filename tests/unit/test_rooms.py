"""The rooms of the architecture: imports point down, and what may live where."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "lachesis"
# From the top down; a room may import from rooms below it and from itself.
ROOMS = [
    ("cli", "doctor", "__main__"),
    ("env_cli", "launch", "grpo", "run", "serve", "recovery"),
    ("build", "build_engine", "build_ranks", "build_sinks", "options", "rundir", "status"),
    ("config",),
    ("train",),
    ("bridges",),
    ("pipeline",),
    ("rollouts",),
    ("environments",),
    ("engines",),
    ("api",),
    ("metrics",),
    ("files", "deadline", "types", "errors", "__init__"),
]
# What any room may import, wherever it stands.
COMMON = {"config.schema", "config.capabilities", "types", "errors", "deadline", "files"}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(module: str) -> int:
    name = module.split(".")[0]
    return next(i for i, names in enumerate(ROOMS) if name in names)


def is_common(module: str) -> bool:
    return module in COMMON or module.startswith("config.schema.")


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    own = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    upward = [m for m in imports(path) if not is_common(m) and room_of(m) < room_of(own)]
    assert not upward, f"{own} imports {upward} from rooms above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_command_line_prints_or_exits(path):
    calls = {
        node.func.id if isinstance(node.func, ast.Name) else f"{getattr(node.func.value, 'id', '')}.{node.func.attr}"
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }
    if path.parent.name != "cli":
        assert not calls & {"print", "sys.exit", "exit", "os._exit"}


def test_the_loop_knows_no_concrete_class():
    loop = imports(SOURCE / "train" / "loop.py")
    assert not [m for m in loop if m.split(".")[0] in ("engines", "rollouts") or "in_process" in m or "single" in m]


def test_losses_and_advantages_are_pure_tensor_functions():
    for name in ("loss", "advantage", "ratios"):
        modules = imports(SOURCE / "train" / f"{name}.py")
        assert all(m == "errors" or m.startswith("train.") for m in modules), (name, modules)
