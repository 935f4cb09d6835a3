"""``lachesis env list`` and ``info``: the installed environments, by the names that all commands accept."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lachesis.common.errors import ConfigError
from lachesis.common.imports import entry_point_names
from lachesis.plugins.atropos.environments.shipped import SHIPPED
from lachesis.plugins.atropos.evaluate import resolve
from lachesis.rollouts.datasets.rows import PREFIX

_TASKSETS = "verifiers.v1.tasksets"


@dataclass(frozen=True, slots=True)
class Listed:
    """An environment by its name, with its kind, a sentence about it, and the keys that train on it."""

    name: str
    kind: str
    about: str
    keys: str


def installed() -> list[Listed]:
    """Return all environments that this Python has: shipped, of reasoning-gym, of verifiers, and other packages'."""
    return [*_shipped(), *_of_verifiers(), *_of_packages(), *_of_reasoning_gym()]


def described(name: str) -> Listed:
    """Describe an environment, given by any name that ``lachesis env try`` takes.

    Raises:
        ConfigError: it is neither installed nor a file, class or address.
    """
    known = {one.name: one for one in installed()}
    if name in known:
        return known[name]
    kind, flags = resolve(name)
    if flags and kind.name == "verifiers" and not name.endswith(".py") and _docstring(name) is None:
        raise ConfigError(f"there is no environment {name!r}", remedy="see `lachesis env list`, or give FILE.py:CLASS")
    if kind.name == "verifiers":
        return _verifiers(name, _docstring(name) or "")
    if flags:
        return Listed(name, "steps", "A class that is stepped.", f"source: {{kind: steps, environment: '{name}'}}")
    return Listed(name, "rollout API", _first(kind.__doc__), f"lachesis run --environment {name}")


def _shipped() -> Iterator[Listed]:
    for name, kind in SHIPPED.items():
        yield Listed(name, "rollout API", _first(kind.__doc__), f"lachesis run --environment {name}")


def _of_reasoning_gym() -> Iterator[Listed]:
    if importlib.util.find_spec("reasoning_gym") is None:
        return
    from reasoning_gym.factory import DATASETS

    for task, (dataset, _) in sorted(DATASETS.items()):
        name = f"{PREFIX}{task}"
        keys = f"data: {{path: '{name}'}}\nrewards: {{functions: [lachesis.rollouts.rewards.reasoning_gym.score]}}"
        yield Listed(name, "data", _first(dataset.__doc__), keys)


def _of_verifiers() -> Iterator[Listed]:
    """Yield the task sets in the library, and the packages, other than ours, that require it."""
    if importlib.util.find_spec("verifiers") is None:
        return
    if importlib.util.find_spec("verifiers.v1") is not None:
        found = importlib.util.find_spec(_TASKSETS)
        for place in (found and found.submodule_search_locations) or ():
            for path in sorted(Path(place).glob("*/taskset.py")):
                about = _first(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
                yield _verifiers(path.parent.name, about)
    for package in metadata.distributions():
        needs = {requirement.split(";")[0].strip().lower() for requirement in package.requires or ()}
        if any(
            one == "verifiers" or one.startswith(("verifiers>", "verifiers=", "verifiers[", "verifiers "))
            for one in needs
        ):
            name = package.metadata["Name"]
            if name not in ("lachesis", "prime-rl", "prime"):
                yield _verifiers(name, str(package.metadata["Summary"] or ""))


def _verifiers(name: str, about: str) -> Listed:
    return Listed(name, "verifiers", about, f"source: {{kind: verifiers, environment: {name}}}")


def _of_packages() -> Iterator[Listed]:
    for name in entry_point_names("lachesis.source"):
        yield Listed(name, "source", "A source of an installed package.", f"source: {{kind: {name}}}")


def _docstring(name: str) -> str | None:
    """Return the first sentence of an importable module's docstring, without running it; None if there is none."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return _first(ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))))


def _first(text: str | None) -> str:
    """Return the first sentence of a docstring on one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split()).split(". ")[0]
