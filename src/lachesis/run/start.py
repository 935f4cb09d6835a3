"""Start of a run: launches the engine first, and imports :mod:`lachesis.run.train` while the engine starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from lachesis.common.chatter import without_chatter
from lachesis.config.load import LoadedConfig
from lachesis.process.garbage import frozen_imports, thaw
from lachesis.run.context import RunContext
from lachesis.run.directory import only_trainer, run_directory
from lachesis.run.launch import launched_engine, starts_engine

if TYPE_CHECKING:
    from lachesis.run.train import RunSummary


def start_run(
    loaded: LoadedConfig,
    context: RunContext,
    *,
    resume: bool = False,
    overwrite: bool = False,
    imported: Callable[[], None] = lambda: None,
) -> RunSummary:
    """Call :func:`lachesis.run.train.train`, after importing it while the engine starts.

    With several ranks the engine is started once all have joined.

    Args:
        imported: called once transformers has been imported.
    """
    console = context.console
    with ExitStack() as closing:
        closing.enter_context(only_trainer(run_directory(loaded.config)))
        if context.world is None and starts_engine(loaded.config):
            launching = launched_engine(loaded, resume=resume, overwrite=overwrite, console=console)
            context = replace(context, launched=closing.enter_context(launching))
        closing.callback(thaw)
        waiting = console.status("loading torch and the model") if console and console.is_terminal else nullcontext()
        with frozen_imports(), waiting, without_chatter():
            from lachesis.run.train import train
        imported()
        return train(loaded, context, resume=resume, overwrite=overwrite)
