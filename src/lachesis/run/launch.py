"""Start of a run's inference servers, before torch and transformers are imported: that goes on while they come up.

So nothing here imports them but where it has to.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from rich.console import Console

from lachesis.common.deadline import Deadline
from lachesis.common.imports import load_function
from lachesis.common.world import launchers_variables
from lachesis.config.load import LoadedConfig
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.process.forkserver import ForkServer
from lachesis.process.garbage import frozen_imports
from lachesis.process.managed import ManagedProcess, launch_together, wait_together
from lachesis.run.directory import claim_run, engine_log, run_directory

# Set to 0, each server imports for itself.
SHARED_IMPORTS = "LACHESIS_SHARED_IMPORTS"


def seed_everything(seed: int) -> None:
    """Seed the global generators. Sampling and data order have generators of their own."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_up(config: LachesisConfig, *, console: Console | None = None) -> None:
    """Call ``run.setup``, which may make the model. That may take minutes, so ``console`` says it first."""
    if config.run.setup is not None:
        if console is not None:
            console.print(f"run.setup: {config.run.setup} makes ready what the run needs", markup=False)
        load_function(config.run.setup)(config.model.path)


def starts_engine(config: LachesisConfig) -> bool:
    """Whether the run starts servers of its own."""
    return config.engine.place != "trainer" and config.engine.kind != "http"


@dataclass
class LaunchedEngine:
    """Servers on their way up, and whether somebody waits for them by now, who may move their logs.

    ``forkserver`` has their imports; :meth:`wait_ready` and :meth:`stop` end it.
    """

    processes: Sequence[ManagedProcess]
    forkserver: ForkServer | None = None
    taken: bool = False

    def take(self) -> Sequence[ManagedProcess]:
        self.taken = True
        return self.processes

    def wait_ready(self, *, deadline: Deadline) -> None:
        """Return once all are able to serve. Raises as :func:`~lachesis.process.managed.wait_together`."""
        wait_together(self.processes, deadline=deadline)
        if self.forkserver is not None:
            self.forkserver.close()

    def stop(self) -> None:
        """Idempotent."""
        if self.forkserver is not None:
            self.forkserver.kill()
        for process in self.processes:
            process.stop()


@contextmanager
def launched_engine(
    loaded: LoadedConfig, *, resume: bool, overwrite: bool, console: Console | None
) -> Iterator[LaunchedEngine]:
    """Within it the run's servers come up, after ``run.setup``. Where nobody takes them, nothing is left of them.

    Raises:
        ConfigError: a rule forbids the configuration, or the run may not have its directory.
        EngineError: a port is taken.
    """
    config = loaded.config
    check(config, located=loaded.located, name=loaded.name)
    directory = run_directory(config)
    claim_run(directory, resume=resume, overwrite=overwrite)
    log_path = engine_log(directory)
    with ExitStack() as closing:
        # What they import depends on the model, which run.setup may have to make first.
        forkserver = begin_imports(config, log_path=log_path) if config.run.setup is None else None
        launched = LaunchedEngine([], forkserver)
        closing.callback(lambda: _end(launched, log_path=log_path))
        with frozen_imports():
            importlib.import_module("torch")  # to seed it, and a server is told what share of the GPU it gets
        seed_everything(config.run.seed)
        set_up(config, console=console)
        launched = launch_servers(config, directory=directory, log_path=log_path, forkserver=forkserver)
        yield launched


def _end(launched: LaunchedEngine, *, log_path: Path) -> None:
    launched.stop()
    if not launched.taken:
        for path in {log_path, *(process.log_path for process in launched.processes)}:
            path.unlink(missing_ok=True)


def begin_imports(config: LachesisConfig, *, log_path: Path) -> ForkServer | None:
    """The process that imports what the servers need, on its way; ``None`` where each had better do so itself.

    It begins sooner than servers can, whose share of a GPU is not known yet, and imports once for all of them.

    Args:
        log_path: of the first server, which begins anew.

    Raises:
        EngineError: the log cannot be written.
    """
    log_path.unlink(missing_ok=True)
    if os.environ.get(SHARED_IMPORTS) == "0":
        return None
    engine = config.engine
    # Without vLLM the server says what is to be installed. Elsewhere than on Linux libraries do not survive a fork.
    if engine.kind != "vllm" or sys.platform != "linux" or util.find_spec("vllm") is None:
        return None
    of_ranks = launchers_variables(os.environ)
    env = {name: value for name, value in os.environ.items() if name not in of_ranks}
    if engine.devices is not None:  # vLLM remembers what it has found out about the first GPU that it sees
        env["CUDA_VISIBLE_DEVICES"] = engine.devices
    return ForkServer(
        "lachesis.engines.vllm.preload", [config.model.path, *engine.extra_args], log_path=log_path, env=env
    )


def launch_servers(
    config: LachesisConfig, *, directory: Path, log_path: Path, forkserver: ForkServer | None = None
) -> LaunchedEngine:
    """The servers that the run is to start, on their way up; none where they run already.

    Args:
        directory: the run's.
        log_path: of the first server.
        forkserver: what :func:`begin_imports` gave, where it has been called.

    Raises:
        EngineError: a port is taken.
    """
    from lachesis.engines.build import server_processes
    from lachesis.run.share import with_devices, with_share

    if forkserver is None and starts_engine(config):
        forkserver = begin_imports(config, log_path=log_path)
    launched = LaunchedEngine([], forkserver)
    try:
        placed = with_devices(with_share(config), environment=os.environ)
        launched.processes = server_processes(placed, directory=directory, log_path=log_path, forkserver=forkserver)
        for process in launched.processes[1:]:
            process.log_path.unlink(missing_ok=True)
        launch_together(launched.processes)
    except BaseException:
        launched.stop()
        raise
    return launched
