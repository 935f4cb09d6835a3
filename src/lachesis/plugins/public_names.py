"""Aliases of plug-ins' modules, by the names that users import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from lachesis.common.chatter import without_chatter

# Public packages, and where they are; their modules are found by public names too.
PUBLIC = {
    "lachesis.environments": "lachesis.plugins.atropos.environments",
    "lachesis.rollouts.agent": "lachesis.plugins.environments.agents",
    "lachesis.rollouts.rewards.grpo_code": "lachesis.plugins.sandbox.rewards.grpo_code",
    "lachesis.rollouts.rewards.registry": "lachesis.rollouts.rewards.built_in",  # its name in earlier versions
    "lachesis.rollouts.rewards.reasoning_gym": "lachesis.plugins.environments.reasoning_gym",
    "lachesis.trl": "lachesis.plugins.trl",
}


def module_of(name: str) -> str | None:
    """Return the module that is imported as ``name``; None if the name is not an alias."""
    for public, place in PUBLIC.items():
        if name == public or name.startswith(f"{public}."):
            return place + name[len(public) :]
    return None


class _Aliases:
    """Finder and loader of aliases: a module has one set of classes, whatever name it is imported by."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if module_of(name) is not None else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        place = module_of(spec.name)
        assert place is not None
        try:
            with without_chatter():
                module = import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from None
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has written the alias into it; it ran when it was imported under its own name.
        module.__spec__ = self._spec


def find_public_names() -> None:
    """Let imports find the modules of :data:`PUBLIC`. Idempotent."""
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())  # before the one of files, which would load a second copy
