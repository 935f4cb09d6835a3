"""Loading of the reward functions in a configuration: by name, by import path, and with arguments."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.common.contracts import entry_point_group
from lachesis.common.errors import ConfigError
from lachesis.common.imports import load_function, names_module

GROUP = entry_point_group("reward")
# Arguments of reward functions; a factory takes none of them.
_REWARD_ARGUMENTS = frozenset({"completions", "prompts", "completion_ids"})
# Code whose time limits are signals, which only a main thread receives.
_SIGNALS = re.compile(r"\bmath_verify\b|\bsignal\.(alarm|setitimer|signal)\b")


@dataclass(frozen=True, slots=True)
class ImportPath:
    """A function by its name, which only the process that it runs in imports; ``arguments`` are a mapping in JSON."""

    spec: str
    base_dir: Path
    arguments: str = "{}"


def load_named(path: ImportPath) -> Callable[..., Any]:
    """Load a reward function: one of the registry, or an import path's.

    A function that takes completions gets the arguments beside them; any other is a factory, called with them.

    Raises:
        ConfigError: the function does not exist or does not take these arguments, or a factory makes no function.
    """
    arguments = json.loads(path.arguments)
    if names_module(path.spec):
        function = load_function(path.spec, path.base_dir)
    else:  # imported only here, because every worker process would pay for the sandbox and its judges
        from lachesis.rollouts.rewards.built_in import FACTORIES, FUNCTIONS

        if path.spec in FACTORIES:
            return _made(FACTORIES[path.spec], arguments, path.spec)
        function = FUNCTIONS.get(path.spec) or load_function(path.spec, path.base_dir, group=GROUP)
    if not arguments:
        return function
    if _takes_completions(function):
        return functools.update_wrapper(functools.partial(function, **arguments), function)
    return _made(function, arguments, path.spec)


def needs_main_thread(function: Callable[..., Any]) -> bool:
    """Return True if the file of a function uses signals, or math-verify, which does."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        return file is not None and _SIGNALS.search(Path(file).read_text(encoding="utf-8")) is not None
    except (TypeError, OSError, UnicodeDecodeError):  # not a function from a file, so nothing is known about it
        return False


def _takes_completions(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return bool(_REWARD_ARGUMENTS & parameters.keys())


def _made(factory: Callable[..., Any], arguments: Mapping[str, Any], spec: str) -> Callable[..., Any]:
    try:
        made = factory(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{spec!r} cannot be called with {', '.join(arguments) or 'no arguments'}: {error}",
            remedy="correct the `kwargs` of this reward",
        ) from error
    if not callable(made):
        raise ConfigError(
            f"{spec!r} with `kwargs` returned a {type(made).__name__}, not a reward function",
            remedy="name a function that takes completions and these arguments, or one that returns such a function",
        )
    return made


def names_model(spec: str, base_dir: Path) -> str | None:
    """Return the directory or hub id of a model if ``spec`` is one: it has a ``/`` and is not ``FILE.py:FUNCTION``."""
    if "/" not in spec or ".py:" in spec:
        return None
    directory = base_dir / Path(spec).expanduser()
    return str(directory) if directory.is_dir() else spec
