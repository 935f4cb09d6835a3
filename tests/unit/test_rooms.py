"""The two storeys of the architecture, and the rooms of the core: what may import what, and what may live where."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import combinations, pairwise
from pathlib import Path

import pytest

import lachesis
from tests.paths import PACKAGE

# From the top down, as the package's docstring lists them.
ROOMS = (lachesis.__doc__ or "").strip().rpartition(":\n")[2].rstrip(".").replace("\n", " ").split(", ")
# Products beside the core, each a folder; they may import any room of it.
PLUGINS = (
    "atropos",
    "benchmarks",
    "checks",
    "cluster",
    "dialects",
    "embedded_server",
    "environments",
    "export",
    "mixture",
    "planning",
    "report",
    "reward_models",
    "sandbox",
    "serving",
    "sinks",
    "sweep",
    "teachers",
    "tinker",
    "trl",
    "vision",
)
# Plug-ins that use another, and why.
PLUGIN_IMPORTS_PLUGIN = {
    ("benchmarks", "report"): "its intervals are those of a report",
    ("benchmarks", "export"): "merges a run's adapter",
    ("checks", "sandbox"): "tries the walls",
    ("environments", "sandbox"): "agents run behind its wall, and it judges the files that they leave",
    ("export", "report"): "the card has a report's figures",
    ("serving", "dialects"): "takes the server's section of an Axolotl file",
    ("serving", "embedded_server"): "one of the engines that it serves",
    ("sweep", "report"): "compares its runs on a page",
    ("trl", "export"): "a trainer saves and pushes its model",
    ("atropos", "dialects"): "its commands take the flags that the dialect translates",
    ("atropos", "environments"): "`lachesis env try` plays steps and verifiers too",
    ("cluster", "atropos"): "tells whether a job starts its API and environments",
}
# What any room may import, wherever it stands.
ANYWHERE = ("config.schema", "config.section")
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> int:
    """Return the place of a module's room from the top; the package's own two files are above all rooms."""
    name = module.split(".")[0]
    return -1 if name in ("__init__", "__main__") else ROOMS.index(name)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def plugin_of(module: str) -> str | None:
    """Return the plug-in that a module belongs to; None for the core."""
    parts = module.split(".")
    return parts[1] if parts[0] == "plugins" and len(parts) > 1 else None


def at_import(path: Path) -> set[str]:
    """Return what a file imports of this package when it is loaded: neither in functions nor for types alone."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lachesis":
            base = (node.module or "").removeprefix("lachesis").lstrip(".")
            found |= {".".join(filter(None, (base, alias.name))) for alias in node.names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _for_types(node):
            nodes += ast.iter_child_nodes(node)
    return found


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


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
    assert {entry.name for entry in folders(PACKAGE)} == {*ROOMS, "plugins"}
    assert tuple(entry.name for entry in folders(PACKAGE / "plugins")) == PLUGINS
    assert {entry.name for entry in PACKAGE.iterdir() if entry.is_file()} == {"__init__.py", "__main__.py", "py.typed"}


# Files of one name in neighbouring folders, and what each of them is there.
SAME = {
    "backend.py": "the engine behind a server's routes: the contract, and those that have it",
    "base.py": "the base classes of a folder",
    "build.py": "how what a folder has is put together from the configuration",
    "canary.py": "the canary: how an engine reads it, and how two readings are compared",
    "client.py": "the client of a server: of inference, or of the rollout API",
    "custom.py": "parts that users write, of the kind of that folder",
    "environments.py": "the command `lachesis env`, and what it does",
    "gate.py": "who may use an engine's model, and when",
    "training.py": "sections of the configuration, and the rules over them",
}


def neighbours() -> Iterator[tuple[Path, Path]]:
    """Rooms that follow each other, and folders of one room."""
    rooms = [PACKAGE / room for room in ROOMS]
    yield from pairwise(rooms)
    inner = {file.parent for file in PACKAGE.rglob("__init__.py")} - {PACKAGE, PACKAGE / "plugins"}
    for room in sorted(inner):
        yield from combinations(folders(room), 2)


def test_what_has_one_name_in_neighbouring_folders_is_one_thing():
    found = [{file.name for file in one.glob("*.py")} & {file.name for file in other.glob("*.py")}
             for one, other in neighbours()]  # fmt: skip
    assert set().union(*found) - {"__init__.py"} == SAME.keys()


CORE = [path for path in FILES if plugin_of(module_of(path)) is None and module_of(path) != "plugins"]


SECTIONS = tuple(sorted((PACKAGE / "plugins").glob("*/section.py")))


def is_section(module: str) -> bool:
    """Return True for what a plug-in's section of the configuration defines."""
    return module.startswith("plugins.") and module.split(".")[2:3] == ["section"]


def test_no_file_of_the_core_imports_a_plug_in_but_by_the_table_of_names():
    found = {(module_of(path), module) for path in CORE for module in at_import(path) if module.startswith("plugins")}
    tables = {"plugins.load", "plugins.public_names.find_public_names"}  # what is loaded, and imported, by name
    assert {module for _, module in found if not is_section(module)} == tables
    assert {room for room, module in found if is_section(module)} <= {
        "config.keys", "config.schema", "config.schema.process", "config.schema.rollouts"
    }  # fmt: skip


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.parent.name)
def test_a_section_of_a_plug_in_needs_neither_torch_nor_the_plug_in(path: Path):
    loaded = closure(module_of(path)) - {path, path.parent / "__init__.py", PACKAGE / "plugins" / "__init__.py"}
    assert all(module_of(file).split(".")[0] in ("__init__", "common", "config") for file in loaded)
    assert lines(loaded) <= 400
    foreign = [name for file in loaded | {path} for name in ast.walk(ast.parse(file.read_text())) if _of_torch(name)]
    assert not foreign


def _of_torch(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.split(".")[0] in ("torch", "transformers") for name in names)


def closure(module: str) -> set[Path]:
    """Return the files that importing ``module`` loads, packages included."""
    loaded: set[Path] = set()
    names = [module]
    while names:
        parts = names.pop().split(".")
        for end in range(1, len(parts) + 1):
            stem = PACKAGE.joinpath(*parts[:end])
            path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
            if path.is_file() and path not in loaded:
                loaded.add(path)
                names += at_import(path)
    return loaded


def anywhere_imports(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, in functions too, but not for types alone."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lachesis":
            base = (node.module or "").removeprefix("lachesis").lstrip(".")
            full = [".".join(filter(None, (base, alias.name))) for alias in node.names]
            found |= {
                name if PACKAGE.joinpath(*name.split(".")).with_suffix(".py").is_file() else base for name in full
            }
        elif not _for_types(node):
            nodes += ast.iter_child_nodes(node)
    return found


def test_no_modules_import_each_other_in_a_circle():
    sorter = TopologicalSorter({module_of(path): anywhere_imports(path) - {module_of(path)} for path in FILES})
    sorter.prepare()  # raises CycleError with the modules of a circle


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


@pytest.mark.parametrize(
    ("module", "most"), [("run.train", 36_700), ("config.load", 4_060), ("rollouts.rewards.built_in", 1_905)]
)
def test_importing_it_loads_no_more_than_it_needs(module: str, most: int):
    loaded = closure(module)
    sections = {*SECTIONS, *(path.parent / "__init__.py" for path in SECTIONS)}
    assert not {path for path in loaded - sections if plugin_of(module_of(path)) is not None}
    assert lines(loaded) <= most


def test_the_core_stays_small():
    assert lines(CORE) <= 54_000
    assert lines((PACKAGE / "common").glob("*.py")) <= 2_500
    assert lines(FILES) <= 90_000


def test_no_plug_in_imports_another():
    pairs = {(plugin_of(module_of(path)), plugin_of(module)) for path in FILES for module in imports(path)}
    found = {(own, other) for own, other in pairs if own is not None and other is not None and own != other}
    assert found == PLUGIN_IMPORTS_PLUGIN.keys()


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    upward = [m for m in imports(path) if not anywhere(m) and not m.startswith("plugins") and room_of(m) < room_of(own)]
    assert not upward, f"{own} imports {upward} from rooms above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_commands_print_or_exit(path):
    commands = path.parent.name in ("cli", "commands") or path.name == "commands.py"
    # They are no commands: one ends a server that a signal has told to end, one a process that can do nothing else, one
    # a process that a user's function has forked.
    enders = ("plugins/serving/bounded_end.py", "process/lost_threads.py", "process/threads.py")
    if not commands and str(path.relative_to(PACKAGE)) not in enders:
        assert not calls(path) & {"print", "sys.exit", "exit", "os._exit"}


def test_the_loop_knows_no_concrete_class():
    loop = imports(PACKAGE / "train" / "loop.py")
    assert not [m for m in loop if m.split(".")[0] in ("engines", "rollouts") or "in_process" in m or "single" in m]


def test_losses_and_advantages_are_pure_tensor_functions():
    records = {"common.errors", "common.types", "config.schema"}
    for name in ("loss", "advantage", "ratios"):
        modules = imports(PACKAGE / "train" / "losses" / f"{name}.py")
        assert all(m in records or m.startswith("train.losses.") for m in modules), (name, modules)
