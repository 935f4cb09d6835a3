"""Bridges through a directory: saved by the trainer, then loaded by the running or a newly started engine.

Directories are read once, minutes at most after they were written, by a process on this machine or on a file system
shared with it. So they are not synced to disk, which would take longer than everything else; after a power cut a run
resumes from its checkpoints instead.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from torch import Tensor

from lachesis.bridges.base import EngineLeftOut, PolicyT
from lachesis.bridges.external import Command, ExternalBridge, Servers
from lachesis.bridges.model_files import save_adapter, write_checkpoint
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, EngineUnreachable, StaleWeights
from lachesis.common.files import atomic_directory, clean_leftovers
from lachesis.config.schema import BridgeCapabilities
from lachesis.engines.http.control import ServerControl

logger = logging.getLogger(__name__)

# The model name under which requests may ask for the policy's adapter.
ADAPTER_NAME = "policy"

# Writes a policy's weights into an empty directory.
Save = Callable[[PolicyT, Path], None]
# Makes a server load the weights in a directory as those of a version.
Load = Callable[[ServerControl, Path, int, Deadline], None]


class SavedBridge(ExternalBridge[PolicyT]):
    """Bridge with a directory for each version, which running servers load, or servers started for it.

    They are restarted if ``capabilities`` say that the bridge owns its engine; ``sync_s`` covers that start.

    Args:
        directory: as ``<run>/adapters``; the servers have to be allowed to load from it.
        keep_last: number of directories kept; the served one is always among them.
        save: the writer, an :class:`AdapterWriter` or :class:`CheckpointFiles`.
        load: has a server load the files, :func:`load_adapter`, :func:`load_checkpoint` or :func:`started_on_it`.
        done: log message after each transfer, with its version and seconds.
        command: makes the command of servers that are started on the directory.
    """

    def __init__(
        self,
        servers: Servers[PolicyT],
        *,
        capabilities: BridgeCapabilities,
        directory: Path,
        keep_last: int,
        save: Save[PolicyT],
        load: Load,
        done: str,
        command: Command | None = None,
    ) -> None:
        super().__init__(servers, capabilities=capabilities)
        self._saved = VersionedDirectories(directory, keep_last=keep_last)
        self._save = save
        self._load = load
        self._done = done
        self._command = command

    def _transfer(self, version: int, *, deadline: Deadline) -> None:
        """Save and load the weights. Raises EngineError, before the engine is told, if the disk cannot be written."""
        started = time.perf_counter()
        with self._saved.writing(version) as directory:
            self._save(self.policy, directory)
        path = self._saved.path(version)
        if self.capabilities.owns_engine:
            assert self._owned is not None, "config.rules checks it"
            self._owned.restart(deadline=deadline, command=self._command, checkpoint=path)
        self._load_on_all(path, version, deadline)
        if self.capabilities.owns_engine:
            self._build_proof()
        self._saved.prune(serving=path)
        logger.info(self._done, version, time.perf_counter() - started)

    def _load_on_all(self, path: Path, version: int, deadline: Deadline) -> None:
        """Have all servers load the saved files.

        Raises:
            EngineLeftOut: some could not, and count as dead now.
            EngineError, DeadlineExceeded: none could.
        """
        failed: dict[str, EngineError | DeadlineExceeded] = {}
        loaded: list[str] = []

        def load(server: ServerControl) -> None:
            try:
                self._load(server, path, version, deadline)
            except (EngineUnreachable, StaleWeights):
                raise
            except (EngineError, DeadlineExceeded) as error:
                failed[server.url] = error
            else:
                loaded.append(server.url)

        self.engine.on_all(load)
        if not failed:
            return
        first = next(iter(failed.values()))
        if not loaded:
            raise first
        for url, error in failed.items():
            self.engine.fleet.died(url, error.message)
        raise EngineLeftOut(first.message) from first


class VersionedDirectories:
    """Directories ``parent/v{version}`` of written versions, the latest few of which are kept.

    Args:
        parent: created at the first write, and used for nothing else.
        keep_last: number of latest writes kept, at least 1.
    """

    def __init__(self, parent: Path, *, keep_last: int) -> None:
        self.parent = Path(parent).absolute()
        self.keep_last = keep_last

    @contextmanager
    def writing(self, version: int) -> Generator[Path]:
        """Yield an empty directory that becomes the one of ``version`` if the block ends without an error.

        An earlier directory of this version is replaced. An error removes the written files.

        Raises:
            EngineError: the disk is full or cannot be written.
        """
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            clean_leftovers(self.parent)
            with atomic_directory(self.path(version), durable=False) as temporary:
                yield temporary
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "no space is left" if full else f"{error.strerror or error}"
            raise EngineError(
                f"weight version {version} cannot be written to {self.path(version)}: {what}",
                remedy="free space on that disk, lower bridge.keep_last, or move run.dir to a larger disk"
                if full
                else "check the directory and its permissions",
            ) from error

    def path(self, version: int) -> Path:
        """Return the directory of a version."""
        return self.parent / f"v{version}"

    def prune(self, *, serving: Path) -> None:
        """Delete all but the ``keep_last`` latest writes; never ``serving``, which the engine may read again."""
        # By time, not by version: a run that went back to an earlier step writes lower versions again.
        written = sorted(self.parent.glob("v*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in written[self.keep_last :]:
            if path != serving:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class AdapterWriter(Generic[PolicyT]):
    """Writer of a policy's adapter as peft saves it: its ``tensors`` by name, and its ``config``, requested once."""

    tensors: Callable[[PolicyT], Mapping[str, Tensor]]
    config: Callable[[PolicyT], bytes]
    _config_bytes: bytes | None = field(default=None, init=False)

    def __call__(self, policy: PolicyT, directory: Path) -> None:
        if self._config_bytes is None:
            self._config_bytes = self.config(policy)
        save_adapter(directory, tensors=self.tensors(policy), config=self._config_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles(Generic[PolicyT]):
    """Writer of all ``weights`` of a policy by Hugging Face's names, and its ``companions``, the other files."""

    weights: Callable[[PolicyT], Iterable[tuple[str, Tensor]]]
    companions: Callable[[PolicyT, Path], None]

    def __call__(self, policy: PolicyT, directory: Path) -> None:
        write_checkpoint(directory, self.weights(policy))
        self.companions(policy, directory)


def load_adapter(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """Have the server replace its adapter with the saved one."""
    server.load_adapter(path, name=ADAPTER_NAME, version=version, deadline=deadline)


def load_checkpoint(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """Have the server replace its weights with the checkpoint."""
    server.reload(path, version=version, deadline=deadline)


def started_on_it(server: ServerControl, path: Path, version: int, deadline: Deadline) -> None:
    """Tell a server that was started on the checkpoint its version."""
    server.set_version(version, deadline=deadline)
