"""Start of a run: its engine is launched first, and :mod:`lachesis.run.train` is imported while that comes up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console

from lachesis.common.chatter import without_chatter
from lachesis.common.world import World
from lachesis.config.load import LoadedConfig
from lachesis.process.garbage import frozen_imports, thaw
from lachesis.run.directory import only_trainer, run_directory
from lachesis.run.launch import launched_engine, starts_engine

if TYPE_CHECKING:
    from lachesis.run.companions import Companions
    from lachesis.run.train import RunSummary


def train(
    loaded: LoadedConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    companions: Companions | None = None,
    world: World | None = None,
    imported: Callable[[], None] = lambda: None,
) -> RunSummary:
    """As :func:`lachesis.run.train.train`, which is imported beside the start of the engine.

    With several ranks the engine is started once they have met.

    Args:
        imported: called once transformers is there.
    """
    with ExitStack() as closing:
        closing.enter_context(only_trainer(run_directory(loaded.config)))
        launched = None
        if world is None and starts_engine(loaded.config):
            launched = closing.enter_context(
                launched_engine(loaded, resume=resume, overwrite=overwrite, console=console)
            )
        closing.callback(thaw)
        waiting = console.status("loading torch and the model") if console and console.is_terminal else nullcontext()
        with frozen_imports(), waiting, without_chatter():
            from lachesis.run.train import train as train_on
        imported()
        return train_on(
            loaded,
            resume=resume,
            overwrite=overwrite,
            console=console,
            stop_requested=stop_requested,
            companions=companions,
            world=world,
            launched=launched,
        )
