"""Training from Python: the same configuration and the same run as from a file, with objects in their places."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.terminal import SafeConsole
from lachesis.common.world import find_world
from lachesis.config.objects import load_objects
from lachesis.run.handle import Run

RewardArgument = str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | Mapping[str, Any]


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    rewards: RewardArgument | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    **keys: Any,
) -> Run:
    """Begin a run in the background, and return a handle on it at once.

    ``lachesis.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, rewards=[right], run={"steps": 100})``

    Args:
        config: a YAML file or a mapping to start from; the keys below are laid over it.
        model: the model's path or hub id, or the whole section.
        data: a path, rows (a list of dictionaries, a ``datasets.Dataset``, a ``DataFrame``), or the whole section, in
            which ``path`` and ``eval_path`` may be rows.
        rewards: functions, or names of functions, or the whole section.
        resume: go on from the last checkpoint of the run that is in the directory.
        overwrite: replace the run that is there.
        progress: show a line a step on standard error.
        **keys: all other sections of the configuration as mappings, such as ``run={"steps": 100}``; functions may
            stand where the YAML has their names.

    Raises:
        ConfigError: the keys are wrong, as in a file; or a run is there, or going on. What goes wrong later is
            raised by :meth:`lachesis.run.handle.Run.wait`.
    """
    run = load(config, model=model, data=data, rewards=rewards, **keys)
    return run.start(
        resume=resume, overwrite=overwrite, console=SafeConsole(stderr=True, highlight=False) if progress else None
    )


def load(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    rewards: RewardArgument | None = None,
    **keys: Any,
) -> Run:
    """A run that is checked and not started: ``load("config.yaml").start()``.

    ``load("runs/NAME")`` is a handle on the run in that directory, to look at it or to ``start(resume=True)``.

    Args:
        config, model, data, rewards, **keys: as :func:`train`.

    Raises:
        ConfigError: the keys are wrong, as in a file, or torchrun has started several processes of this program.
    """
    world = find_world(os.environ)
    if world is not None and world.size > 1:
        raise ConfigError(
            f"this program is one of {world.size} ranks, and lachesis.train trains in one process",
            remedy="start several with torchrun and `lachesis train CONFIG`",
        )
    short = {"model": model, "data": data, "rewards": rewards}
    found = load_objects(config, {name: value for name, value in short.items() if value is not None} | keys)
    loaded = found.loaded
    if config is not None and not isinstance(config, Mapping) and Path(config).is_dir():
        place = Path(config).absolute()  # also where it was moved to
        section = loaded.config.run.model_copy(update={"dir": str(place.parent), "name": place.name})
        loaded = replace(loaded, config=loaded.config.model_copy(update={"run": section}))
    return Run(loaded, given=found.given)
