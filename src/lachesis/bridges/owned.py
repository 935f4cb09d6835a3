"""An engine whose processes a bridge starts, restarts and stops."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.process import ManagedProcess
from lachesis.engines.http.client import HttpEngine

# The command that serves the checkpoint in a directory, for the server of that number.
Command = Callable[[int, Path], Sequence[str]]
_LOOK_S = 0.05


class OwnedEngine:
    """Servers, the processes behind them in the same order, and the run they belong to.

    Args:
        engine: the client of the servers.
        processes: one for each server, running or not.
        owner: the run, in whose name each new session is claimed.
        start_s: the longest that a start after a death may take, in seconds.
    """

    def __init__(
        self, *, engine: HttpEngine, processes: Sequence[ManagedProcess], owner: str, start_s: float | None = None
    ) -> None:
        self.engine = engine
        self._start_s = start_s
        self._processes = tuple(processes)
        self._owner = owner
        self._fresh = True

    def restart(self, *, deadline: Deadline, command: Command | None = None, checkpoint: Path | None = None) -> None:
        """Start all servers anew, or for the first time, and claim them.

        Args:
            deadline: of their being able to serve.
            command: makes the command that serves ``checkpoint``; without it each server keeps its own.

        Raises:
            EngineError: a server died or its port is taken; with the last lines of its log.
            DeadlineExceeded: one was not able to serve in time.
        """
        # Those that have just been started for this run and never had weights of it need no restart.
        if not (self._fresh and command is None and all(process.pid is not None for process in self._processes)):
            self.stop()
            if command is not None and checkpoint is not None:
                for number, process in enumerate(self._processes):
                    process.command = tuple(map(str, command(number, checkpoint)))
            self._start(deadline)
        self._fresh = False
        self.engine.connect(deadline=deadline)
        self.engine.claim(self._owner, deadline=deadline)

    def start_again(self) -> None:
        """:meth:`restart` within ``start_s``, of servers that died."""
        deadline = Deadline("the engine's second start", self._start_s, "deadlines.engine_start_s")
        with deadline.waiting():
            self.restart(deadline=deadline)

    def _start(self, deadline: Deadline) -> None:
        """Launch all, then wait for all; none is left where one fails."""
        try:
            for process in self._processes:
                process.launch()
            for process in self._processes:
                process.wait_ready(deadline=deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all servers. Idempotent."""
        for process in self._processes:
            process.stop()

    def died(self, *, within_s: float = 5.0) -> bool:
        """Whether a server has ended, or does so ``within_s``: its connections break a moment before."""
        deadline = Deadline("the end of a server that does not answer", within_s)
        pause = threading.Event()
        while all(process.pid is not None for process in self._processes):
            if deadline.remaining_s() == 0.0:
                return False
            pause.wait(_LOOK_S)
        return True

    def move_log(self, path: Path) -> None:
        """Move the servers' log to ``path`` while they write it, on the same file system; one that is there stays.

        Raises:
            EngineError: it cannot be moved.
        """
        for number, process in enumerate(self._processes):
            place = path if number == 0 else path.with_stem(f"{path.stem}-{number}")
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.exists():
                    os.replace(place, place.with_stem(f"{place.stem}-before"))
                os.replace(process.log_path, place)
            except OSError as error:
                raise EngineError(
                    f"the engine's log {process.log_path} cannot be moved to {place}: {error.strerror}",
                    remedy="check the directory and its permissions",
                ) from error
            process.log_path = place
