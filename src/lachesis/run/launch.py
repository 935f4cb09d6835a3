"""Start of a run's inference servers. torch and transformers are imported while the servers start.

This module therefore imports torch and transformers only inside functions.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from lachesis.common.imports import load_function
from lachesis.config.load import LoadedConfig
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.engines.gpus import with_devices
from lachesis.process.garbage import frozen_imports
from lachesis.process.managed import ManagedProcess, launch_together
from lachesis.run.directory import claim_run, engine_log, run_directory


def seed_everything(seed: int) -> None:
    """Seed the global random generators. Sampling and data order use separate generators."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_up(config: LachesisConfig, *, console: Console | None = None) -> None:
    """Call ``run.setup``, which may build the model. It may take minutes, so ``console`` announces it first."""
    if config.run.setup is not None:
        if console is not None:
            console.print(f"run.setup: {config.run.setup} prepares the run", markup=False)
        load_function(config.run.setup)(config.model.path)


def starts_engine(config: LachesisConfig) -> bool:
    """Return True if the run starts inference servers itself."""
    return config.engine.place != "trainer" and config.engine.kind != "http"


@dataclass
class LaunchedEngine:
    """Servers that are starting. ``taken`` is True once a caller waits for them; that caller may move their logs."""

    processes: Sequence[ManagedProcess]
    taken: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Return the seconds since the servers were started."""
        return time.monotonic() - self.began

    def take(self) -> Sequence[ManagedProcess]:
        self.taken = True
        return self.processes

    def stop(self) -> None:
        """Stop all servers. Idempotent."""
        for process in self.processes:
            process.stop()


@contextmanager
def launched_engine(
    loaded: LoadedConfig, *, resume: bool, overwrite: bool, console: Console | None
) -> Iterator[LaunchedEngine]:
    """Start the run's servers after ``run.setup``; stop them and remove their files if no caller takes them.

    Raises:
        ConfigError: a rule rejects the configuration, or the run directory cannot be used.
        EngineError: a port is taken.
    """
    config = loaded.config
    check(config, located=loaded.located, name=loaded.name)
    directory = run_directory(config)
    claim_run(directory, resume=resume, overwrite=overwrite)
    log_path = engine_log(directory)
    with ExitStack() as closing:
        launched = LaunchedEngine([])
        closing.callback(lambda: _end(launched, log_path=log_path))
        with frozen_imports():
            importlib.import_module("torch")  # for seeding; and a server needs its share of GPU memory at start
        seed_everything(config.run.seed)
        set_up(config, console=console)
        launched = launch_servers(config, directory=directory, log_path=log_path)
        if console is not None and config.engine.kind == "vllm":
            console.print(f"engine: vLLM is starting; the first time takes minutes; log: {log_path}", markup=False)
        yield launched


def _end(launched: LaunchedEngine, *, log_path: Path) -> None:
    launched.stop()
    if not launched.taken:
        for path in {log_path, *(process.log_path for process in launched.processes)}:
            path.unlink(missing_ok=True)


def launch_servers(config: LachesisConfig, *, directory: Path, log_path: Path) -> LaunchedEngine:
    """Start the servers of the run; start none if the configuration names running servers.

    Args:
        directory: the run directory.
        log_path: the log of the first server.

    Raises:
        EngineError: a port is taken.
    """
    from lachesis.engines.build import server_processes
    from lachesis.run.colocated_engine import with_share

    launched = LaunchedEngine([])
    try:
        placed = with_devices(with_share(config), environment=os.environ)
        launched.processes = server_processes(placed, directory=directory, log_path=log_path)
        for process in launched.processes[1:]:
            process.log_path.unlink(missing_ok=True)
        launch_together(launched.processes)
    except BaseException:
        launched.stop()
        raise
    return launched
