"""Reader of a fork's scripts of open-r1, which hold what its recipes do not: its registry of rewards, and its defaults.

The files are read and not run. They are those of the checkout that contains the recipe.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_REGISTRY = "REWARD_FUNCS_REGISTRY"
_ARGUMENTS = "GRPOScriptArguments"
_MARKS = (".git", "pyproject.toml", "setup.py")
_DEPTHS = ("", "*/", "*/*/", "*/*/*/", "*/*/*/*/")
_MOST_FILES = 500
_LARGEST = 1_000_000


@dataclass(frozen=True, slots=True)
class Script:
    """Rewards in a checkout's code.

    Attributes:
        rewards: names in its registry, with their ``FILE.py:FUNCTION``; None for one without a name.
        defaults: the rewards of a recipe that names none, by the file that says so.
    """

    rewards: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    defaults: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])


def read_script(recipe: str) -> Script:
    """Read the scripts of the checkout that contains ``recipe``, a file's path; empty if there are none."""
    rewards: dict[str, str | None] = {}
    defaults: dict[str, tuple[str, ...]] = {}
    for file in _files(Path(recipe)):
        text = file.read_text(encoding="utf-8", errors="replace")
        for node in _nodes(text) if _REGISTRY in text or _ARGUMENTS in text else ():
            if isinstance(node, ast.Assign) and any(_is_named(target, _REGISTRY) for target in node.targets):
                rewards = dict(_registered(node.value, file)) | rewards
            elif isinstance(node, ast.ClassDef) and node.name == _ARGUMENTS and (named := _default(node)):
                defaults[str(file)] = named
    return Script(rewards, defaults)


def _files(recipe: Path) -> Iterator[Path]:
    """Python files of the checkout, those named rewards.py first."""
    root = next(
        (folder for folder in recipe.absolute().parents if any((folder / mark).exists() for mark in _MARKS)), None
    )
    if root is None or not recipe.is_file():
        return iter(())
    found = [file for depth in _DEPTHS for file in root.glob(f"{depth}*.py")]
    ordered = sorted(found, key=lambda file: (file.name != "rewards.py", str(file)))
    return (file for file in ordered[:_MOST_FILES] if file.is_file() and file.stat().st_size < _LARGEST)


def _nodes(text: str) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse(text))
    except SyntaxError:  # of a Python 2, or half written: not what runs
        return iter(())


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _registered(registry: ast.expr, file: Path) -> Iterator[tuple[str, str | None]]:
    for key, value in zip(registry.keys, registry.values, strict=True) if isinstance(registry, ast.Dict) else ():
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, f"{file}:{value.id}" if isinstance(value, ast.Name) else None


def _default(arguments: ast.ClassDef) -> tuple[str, ...]:
    """Return the texts in the list that is the default of ``reward_funcs``."""
    for field_ in arguments.body:
        if isinstance(field_, ast.AnnAssign) and _is_named(field_.target, "reward_funcs") and field_.value is not None:
            lists = [node for node in ast.walk(field_.value) if isinstance(node, ast.List)]
            texts = [one.value for one in (lists[0].elts if lists else ()) if isinstance(one, ast.Constant)]
            return tuple(text for text in texts if isinstance(text, str))
    return ()
