"""Processes that reward functions run in: started once, killed where a call hangs, replaced when one is gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import lachesis
from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded, RewardError
from lachesis.rollouts.rewards.runners import Answer, Call, Failure, Signature, hung
from lachesis.rollouts.rewards.worker import ImportPath, Load, Loaded, Work, unsendable_arguments, unsendable_logs

_DEATH_REMEDY = "find out why it ends its process (memory, a crash in native code, os._exit)"
_PROGRAM = "import sys; sys.path.append({root!r}); from lachesis.rollouts.rewards.worker import serve; serve({fd})"


class RewardWorkers:
    """``count`` processes that all have the same functions.

    Args:
        functions: by their names; only the processes import them.
        start_s: limit of starting the processes, imports included, in seconds.

    Raises:
        ConfigError: a function cannot be imported.
        RewardError: a process ended before it was ready.
        DeadlineExceeded: the imports take too long.
    """

    def __init__(self, functions: Sequence[ImportPath], *, count: int, start_s: float = 120.0) -> None:
        self.count = count
        self._load = Load(tuple(functions))
        self._start_s = start_s
        self._lock = threading.Lock()
        self._processes: list[_Process | None] = [None] * count
        self.signatures: tuple[Signature, ...] = ()
        self._ready(count)

    def run(self, index: int, calls: Sequence[Call], *, timeout_s: float) -> list[Answer]:
        """An answer for each call of function ``index``; the calls, at most ``count``, run at once.

        A process whose call takes longer than ``timeout_s`` is killed, and another one takes its place before
        the next call.
        """
        with self._lock:
            processes = self._ready(len(calls))
            waiting: dict[Connection, int] = {}
            answers: list[Answer | None] = [None] * len(calls)
            try:
                for number, (process, call) in enumerate(zip(processes, calls, strict=True)):
                    answers[number] = process.send(Work(index, call))
                    if answers[number] is None:
                        waiting[process.connection] = number
                self._collect(waiting, answers, timeout_s)
            finally:  # who is interrupted while waiting must not take these answers for those of the next call
                for number in waiting.values():
                    self._kill(number)
            return [answer or Answer(failure=hung(timeout_s)) for answer in answers]

    def close(self) -> None:
        """End all processes; a later call starts new ones. Idempotent."""
        for number in range(self.count):
            self._kill(number)

    def _collect(self, waiting: dict[Connection, int], answers: list[Answer | None], timeout_s: float) -> None:
        """Wait until all have answered, or died, or the time is over; who answered waits no more."""
        end = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for connection in ready:
                number = waiting[cast(Connection, connection)]
                answers[number] = self._read(number, cast(Connection, connection))
                del waiting[cast(Connection, connection)]

    def _read(self, number: int, connection: Connection) -> Answer:
        try:
            content = connection.recv_bytes()
        except (EOFError, OSError):
            return Answer(failure=self._death(number))
        try:
            return pickle.loads(content)  # from a child of this process, over a pipe that nobody else has
        except Exception as error:  # reading what was logged runs code of its type, whose module may not be here
            return Answer(failure=unsendable_logs(error))

    def _ready(self, count: int) -> list[_Process]:
        """The first ``count`` processes; those that are missing are started, at once."""
        missing = [number for number in range(count) if self._processes[number] is None]
        deadline = Deadline(f"start of {len(missing)} reward workers", self._start_s)
        unread = set(missing)
        try:
            started: dict[int, _Process] = {}
            for number in missing:
                started[number] = self._processes[number] = _start(self._load)
            for number, process in started.items():
                self.signatures = self._loaded(number, process, deadline).signatures
                unread.discard(number)
        finally:  # what a process says of its start must not be taken for an answer later
            for number in unread:
                self._kill(number)
        return [process for process in self._processes[:count] if process is not None]

    def _loaded(self, number: int, process: _Process, deadline: Deadline) -> Loaded:
        if not process.connection.poll(deadline.remaining_s()):
            raise DeadlineExceeded(
                f"{deadline.name} took longer than {self._start_s:g} s, imports included",
                remedy="find out what the modules of the reward functions do when they are imported",
            )
        try:
            loaded: Loaded = process.connection.recv()
        except (EOFError, OSError) as error:
            what = self._death(number).what
            raise RewardError(
                f"a reward worker {what} while it imported the functions", remedy=_DEATH_REMEDY
            ) from error
        if loaded.problem:
            raise ConfigError(loaded.problem, remedy=loaded.remedy)
        return loaded

    def _death(self, number: int) -> Failure:
        code = None
        if process := self._processes[number]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.popen.wait(timeout=5)
        self._kill(number)
        how = "closed its pipe" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return Failure(f"ended its process ({how})", _DEATH_REMEDY, costly=True, traceable=True)

    def _kill(self, number: int) -> None:
        process, self._processes[number] = self._processes[number], None
        if process is not None:
            process.kill()


class WorkerRunner:
    """Runs one of the functions of the workers."""

    def __init__(self, workers: RewardWorkers, index: int) -> None:
        self._workers = workers
        self._index = index

    @property
    def width(self) -> int:
        return self._workers.count

    @property
    def signature(self) -> Signature:
        return self._workers.signatures[self._index]

    def run(self, calls: Sequence[Call], *, timeout_s: float) -> list[Answer]:
        return self._workers.run(self._index, calls, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection

    def send(self, request: Any) -> Answer | None:
        """Send a request; an answer where that is known at once to be in vain."""
        try:
            self.connection.send(request)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Answer(failure=unsendable_arguments(error))
        except OSError:
            return None  # it is gone, which shows where its answer is waited for
        return None

    def kill(self) -> None:
        """End the process and what it started; they are a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.connection.close()


def _start(load: Load) -> _Process:
    ours, theirs = multiprocessing.Pipe()
    root = str(Path(lachesis.__file__).parents[1])
    try:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM.format(root=root, fd=theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
    finally:
        theirs.close()
    process = _Process(popen, ours)
    process.send(load)
    return process
