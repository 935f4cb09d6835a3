"""The rooms of the architecture: imports point down, and what may live where."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest

import lachesis
from tests.paths import PACKAGE

# From the top down, as the package's docstring lists them.
ROOMS = (lachesis.__doc__ or "").strip().rpartition(":\n")[2].rstrip(".").replace("\n", " ").split(", ")
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
def _read(path: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    """What a file imports of this package, and what it calls; its tree is not kept, for all of them are large."""
    imported: list[str] = []
    called: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lachesis"):
            base = (node.module or "").removeprefix("lachesis").lstrip(".")
            imported += [base or alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called.add(f"{getattr(node.func.value, 'id', '')}.{node.func.attr}")
    return tuple(module for module in imported if module != "__version__"), frozenset(called)


def imports(path: Path) -> tuple[str, ...]:
    """Modules of this package that a file imports, without the package's name."""
    return _read(path)[0]


def calls(path: Path) -> frozenset[str]:
    """Functions that a file calls, as they are written there."""
    return _read(path)[1]


def folders(path: Path) -> list[Path]:
    return [entry for entry in sorted(path.iterdir()) if entry.is_dir() and any(entry.glob("*.py"))]


def test_the_rooms_are_the_folders():
    assert {entry.name for entry in folders(PACKAGE)} == set(ROOMS)
    assert {entry.name for entry in PACKAGE.iterdir() if entry.is_file()} == {"__init__.py", "__main__.py", "py.typed"}


# Files of one name in neighbouring folders, and what each of them is there.
SAME = {
    "base.py": "the base classes of a folder",
    "build.py": "how what a folder has is put together from the configuration",
    "canary.py": "the canary: how an engine reads it, and how two readings are compared",
    "check.py": "the command that tries data, or rewards, before a run does",
    "custom.py": "parts that users write, of the kind of that folder",
    "distributed.py": "what a configuration says of several ranks: translated, and checked",
    "environments.py": "the command `lachesis env`, and what it does",
    "fleet.py": "the command `lachesis fleet`, and what it does",
    "gate.py": "who may use an engine's model, and when",
    "player.py": "what plays the rollouts of a source",
    "served.py": "the engine behind a server's routes: the contract, and those that have it",
    "training.py": "sections of the configuration, and the rules over them",
}


def neighbours() -> Iterator[tuple[Path, Path]]:
    """Rooms that follow each other, and folders of one room."""
    rooms = [PACKAGE / room for room in ROOMS]
    yield from pairwise(rooms)
    for room in [folder.parent for folder in PACKAGE.rglob("__init__.py") if folder.parent != PACKAGE]:
        yield from combinations(folders(room), 2)


def test_what_has_one_name_in_neighbouring_folders_is_one_thing():
    found = [{file.name for file in one.glob("*.py")} & {file.name for file in other.glob("*.py")}
             for one, other in neighbours()]  # fmt: skip
    assert set().union(*found) - {"__init__.py"} == SAME.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    upward = [m for m in imports(path) if not anywhere(m) and room_of(m) < room_of(own)]
    assert not upward, f"{own} imports {upward} from rooms above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_prints_or_exits(path):
    # What is forked from a process that has imported much must not end as that one does.
    if path.parent.name != "cli" and path.relative_to(PACKAGE) != Path("process/fork_main.py"):
        assert not calls(path) & {"print", "sys.exit", "exit", "os._exit"}


def test_the_loop_knows_no_concrete_class():
    loop = imports(PACKAGE / "train" / "loop.py")
    assert not [m for m in loop if m.split(".")[0] in ("engines", "rollouts") or "in_process" in m or "single" in m]


def test_losses_and_advantages_are_pure_tensor_functions():
    records = {"common.errors", "common.types", "config.schema"}
    for name in ("loss", "advantage", "ratios"):
        modules = imports(PACKAGE / "train" / "losses" / f"{name}.py")
        assert all(m in records or m.startswith("train.losses.") for m in modules), (name, modules)
