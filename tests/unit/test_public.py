"""What `import lachesis` offers: the names, where they come from, and what they cost."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest

import lachesis
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


def public(name: str) -> Any:
    """What a name stands for; the room is a function, too."""
    return import_module("lachesis.run.library").train if name == "train" else getattr(lachesis, name)


def unannotated(function: Callable[..., Any]) -> list[str]:
    """Parameters without a type, and what is returned."""
    signature = inspect.signature(function)
    missing = [one.name for one in signature.parameters.values() if one.annotation is one.empty]
    returns = signature.return_annotation is not signature.empty or function.__name__ == "__init__"
    return [*({*missing} - {"self", "cls"}), *([] if returns else ["return"])]


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions and properties of a class and of its bases of ours."""
    for owner in ours(cls):
        for name, value in vars(owner).items():
            made_here = getattr(value, "__func__", getattr(value, "fget", value))
            function = value.func if isinstance(value, cached_property) else made_here
            if (
                inspect.isfunction(function)
                and is_written(function)
                and (name == "__init__" or not name.startswith("_"))
            ):
                yield f"{owner.__name__}.{name}", function


def is_written(function: FunctionType) -> bool:
    """And not by dataclasses, from the types of the fields."""
    return function.__code__.co_filename != "<string>"


def ours(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.startswith("lachesis.")]


def inferred_attributes(cls: type) -> Iterator[str]:
    """Public ones that ``__init__`` sets to more than a parameter, without a type: each checker would infer its own."""
    begin = vars(cls).get("__init__")
    if not (inspect.isfunction(begin) and is_written(begin)):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(begin)))):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Name):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
                    yield f"{cls.__name__}.{target.attr}"


@pytest.mark.parametrize("name", [name for name in lachesis.__all__ if name != "__version__"])
def test_each_name_has_all_its_types(name: str):
    """`pyright --verifytypes` says so of all modules, in minutes."""
    value = public(name)
    if not inspect.isclass(value):
        assert unannotated(value) == []
        return
    assert [(where, missing) for where, method in methods(value) if (missing := unannotated(method))] == []
    assert [attribute for base in ours(value) for attribute in inferred_attributes(base)] == []


def test_what_has_no_types_is_found():
    class Part:
        def __init__(self, size):
            self.size = size
            self.double = 2 * size
            self._half = size // 2

        @property
        def whole(self):
            return self.size

    Part.__module__ = "lachesis.of_the_test"
    found = [(where.rpartition(".")[2], unannotated(method)) for where, method in methods(Part)]
    assert found == [("__init__", ["size"]), ("whole", ["return"])]
    assert list(inferred_attributes(Part)) == ["Part.double"]
