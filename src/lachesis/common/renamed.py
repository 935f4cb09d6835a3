"""Modules that files of users import under the names that they had in version 0.1."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED = {
    "lachesis.types": "lachesis.common.types",
    "lachesis.errors": "lachesis.common.errors",
    "lachesis.environments.arithmetic": "lachesis.environments.shipped.arithmetic",
    "lachesis.environments.calculator": "lachesis.environments.shipped.calculator",
    "lachesis.environments.gsm8k": "lachesis.environments.shipped.gsm8k",
    "lachesis.rollouts.grpo_code": "lachesis.rollouts.rewards.grpo_code",
    "lachesis.rollouts.rewards.grpo_code.execution": "lachesis.rollouts.rewards.execution",
}


class _Renamed(Loader):
    """Finds a module by its old name, and loads it by the new one: there is one module, with one set of classes."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in RENAMED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = RENAMED[spec.name]
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has written the old name into it; it ran when it was imported under the new one.
        module.__spec__ = self._spec


def keep_old_names() -> None:
    """Let imports find the modules of :data:`RENAMED`. Idempotent."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.append(_Renamed())
