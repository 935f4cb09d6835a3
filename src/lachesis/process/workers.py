"""Worker processes: functions called in child processes, under limits of time and memory.

Only :class:`ChildProcess` makes such a process and sets its limits; :class:`WorkerPool` keeps
several for many calls. Code of a model runs elsewhere, behind the walls of :mod:`lachesis.plugins.sandbox`.

A child leads a separate session and is killed with its whole process group: only processes that it started in other
sessions outlive it. It ends when the process that made it ends, even by kill -9. It imports only this module and that
of its function.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lachesis.common.errors import DeadlineExceeded, LachesisError

# This imports our package even if another of its name is installed, and puts our folder last on the path.
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import lachesis
sys.path.append(sys.path.pop(0))
from lachesis.process.workers import run_child
run_child{arguments!r}
"""
_CHUNK = 1 << 20
_LOOK_S = 0.05
# Seconds for a child that was killed, or closed its end, to disappear.
_REAP_S = 5.0


class WorkerError(LachesisError):
    """Error of a call without a result.

    ``reason``: it took too long (``timeout``), its process ended (``died``), or its arguments or its result cannot be
    passed to another process; the message says how.
    """

    def __init__(self, reason: Literal["timeout", "died", "arguments", "result"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits that the operating system sets for a child; ``None`` is no limit.

    Args:
        memory_mb: address space, in MiB.
        file_mb: size of a file that it writes, in MiB.
    """

    memory_mb: int | None = None
    file_mb: int | None = None


class ChildProcess:
    """Child process that calls ``function(link, *args)`` and ends; ``link`` is its end of a socket to this process.

    Args:
        function: a function that can be pickled, by its name.
        timeout_s: limit for passing it its arguments, in seconds.
        quiet: its output is dropped; otherwise it goes to the standard error of this process. directory: its working
            directory; it then runs quietly, and gets only ``PATH`` of this process's environment.
        one_thread: libraries for linear algebra use one thread there, unless the environment says otherwise.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *args: Any,
        timeout_s: float,
        limits: ProcessLimits,
        quiet: bool = False,
        directory: Path | None = None,
        one_thread: bool = True,
    ) -> None:
        request = pickle.dumps((function, args))
        environment = dict(os.environ)
        if directory is not None:
            environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(directory)}
        error_output = sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL
        self.link, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        arguments = (theirs.fileno(), lifeline, asdict(limits))
        try:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P" if directory is None else "-I",
                    "-c",
                    _PROGRAM.format(root=str(Path(__file__).parents[2]), arguments=arguments),
                ],
                pass_fds=arguments[:2],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet or directory else error_output,
                stderr=subprocess.DEVNULL if quiet or directory else None,
                env=({"OMP_NUM_THREADS": "1"} if one_thread else {}) | environment,
                cwd=directory,
                start_new_session=True,
            )
        except BaseException:
            self.link.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        with contextlib.suppress(OSError):  # it has already gone, which the wait for its answer will notice
            send_message(self.link, request, timeout_s=timeout_s)

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the pid of the process and of its group."""
        return self._popen.pid

    def read(self, *, timeout_s: float, max_bytes: int) -> bytes:
        """Return the bytes that it writes to its link, until it ends, has written too much, or its time is over.

        Other holders of the link, such as the child's own children, are not waited for.
        """
        content = b""
        end = time.monotonic() + timeout_s
        while len(content) < max_bytes and (remaining_s := end - time.monotonic()) > 0:
            self.link.settimeout(min(_LOOK_S, remaining_s))
            try:
                part = self.link.recv(_CHUNK)
            except TimeoutError:
                if self._popen.poll() is None:
                    continue
                break
            except ConnectionError:
                break
            if not part:
                break
            content += part
        return content[:max_bytes]

    def ending(self) -> str:
        """Describe how it ended, once it has closed its link."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_S)
        code = self._popen.returncode
        if code is None:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill it, without waiting for its end: the reader of its link notices. Any thread may call it."""
        if self._popen.poll() is None:
            self._kill_group()

    def finish(self, *, grace_s: float) -> None:
        """Ask it to end by itself, as idle processes of a pool can, and kill it if it does not in time."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(grace_s)
        self.close()

    def close(self) -> None:
        """Kill the process group and wait for the child's end. Idempotent."""
        if self.link.fileno() < 0:
            return
        self._kill_group()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
            self._popen.wait(_REAP_S)
        self.link.close()
        os.close(self._lifeline)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


class WorkerPool:
    """Pool of ``count`` child processes kept for many calls; one that hung or died is replaced before its next call.

    Thread-safe.

    Args:
        initialize: called with ``args`` in each process when it starts; :attr:`initialized` is its result. name: of the
            processes, in messages.
        start_s: limit of starting processes, imports included, in seconds.
        quiet: their output is dropped; otherwise it goes to the standard error of this process. grace_s: seconds that
            an idle process may take to end by itself, so that its exit handlers run and its files are written.
        one_thread: as for :class:`ChildProcess`.

    Raises:
        WorkerError: a process ended before it was ready.
        DeadlineExceeded: they are not ready in time.
        Any error of ``initialize``.
    """

    def __init__(
        self,
        count: int,
        initialize: Callable[..., Any],
        *args: Any,
        name: str,
        start_s: float = 120.0,
        limits: ProcessLimits = ProcessLimits(),
        quiet: bool = False,
        grace_s: float = 0.0,
        one_thread: bool = True,
    ) -> None:
        self.count = count
        self.initialized: Any = None
        self._initialize = (initialize, args)
        self._name = name
        self._start_s = start_s
        self._grace_s = grace_s
        self._new = partial(ChildProcess, serve, timeout_s=start_s, limits=limits, quiet=quiet, one_thread=one_thread)
        self._workers: list[ChildProcess | None] = [None] * count
        self._idle = set(range(count))
        self._changed = threading.Condition()
        with self._take(count) as numbers:
            self._start(numbers)

    @property
    def pids(self) -> list[int]:
        """Return the pids of the current processes."""
        return [worker.pid for worker in self._workers if worker is not None]

    def run(
        self, function: Callable[..., Any], calls: Sequence[Sequence[Any]], *, timeout_s: float
    ) -> list[Any | WorkerError]:
        """Return the result of ``function(*args)`` for each of at most ``count`` calls, or the error that prevented it.

        The calls run at the same time, each in a separate process, and have ``timeout_s`` together. Waits without
        limit while other threads use the processes.

        Raises: Any error of the function, or of starting a process.
        """
        with self._take(len(calls)) as numbers:
            self._start(numbers)
            return self._ask(numbers, function, calls, timeout_s)

    def close(self) -> None:
        """End all processes, including running calls; a later call starts new ones. Idempotent."""
        end = time.monotonic() + 2 * _REAP_S
        with self._changed:
            while len(self._idle) < self.count and time.monotonic() < end:
                for worker in filter(None, self._workers):
                    worker.kill()
                self._changed.wait(_LOOK_S)
            if self._grace_s:
                for worker in filter(None, self._workers):
                    worker.finish(grace_s=self._grace_s)
            self._drop(range(self.count))

    @contextlib.contextmanager
    def _take(self, count: int) -> Iterator[list[int]]:
        """Take the first ``count`` idle processes, by number: a single caller always gets the same ones."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._idle) >= count)
            numbers = sorted(self._idle)[:count]
            self._idle.difference_update(numbers)
        try:
            yield numbers
        finally:
            with self._changed:
                self._idle.update(numbers)
                self._changed.notify_all()

    def _start(self, numbers: Sequence[int]) -> None:
        missing = [number for number in numbers if self._workers[number] is None]
        function, args = self._initialize
        try:
            for number in missing:
                self._workers[number] = self._new()
            for result in self._ask(missing, function, [args] * len(missing), self._start_s):
                if isinstance(result, WorkerError):
                    raise result
                self.initialized = result
        except BaseException as error:
            self._drop(missing)  # each is ready or gone
            if isinstance(error, WorkerError) and error.reason == "timeout":
                raise DeadlineExceeded(
                    f"start of {len(missing)} {self._name} took longer than {self._start_s:g} s, imports included",
                    remedy="check the work that the functions' modules do on import",
                ) from error
            raise

    def _ask(
        self, numbers: Sequence[int], function: Callable[..., Any], calls: Sequence[Sequence[Any]], timeout_s: float
    ) -> list[Any | WorkerError]:
        end = time.monotonic() + timeout_s
        requests = [_pickle_request(function, args) for args in calls]
        busy: set[int] = set()
        try:
            for number, request in zip(numbers, requests, strict=True):
                worker = self._workers[number]
                if worker is not None and isinstance(request, bytes):
                    busy.add(number)
                    with contextlib.suppress(OSError):  # gone, or hanging: the wait for its answer will tell
                        send_message(worker.link, request, timeout_s=end - time.monotonic())
            return [
                request if isinstance(request, WorkerError) else self._answer(number, end, busy)
                for number, request in zip(numbers, requests, strict=True)
            ]
        finally:  # an answer that nothing waited for must not be taken for the next call's
            self._drop(busy)

    def _answer(self, number: int, end: float, busy: set[int]) -> Any | WorkerError:
        worker = self._workers[number]
        assert worker is not None
        try:
            content = receive_message(worker.link, end=end)
        except TimeoutError:
            return WorkerError("timeout", "did not return in time")
        except (EOFError, OSError):
            return WorkerError("died", f"ended its process ({worker.ending()})")
        busy.discard(number)
        try:
            outcome, value = pickle.loads(content)  # from a child of this process, over a private socket
        except Exception as error:  # reading a result runs code of its type, whose module may be missing here
            return WorkerError("result", str(error))
        if outcome == "raised":
            raise value
        return value if outcome == "returned" else WorkerError(outcome, value)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            worker, self._workers[number] = self._workers[number], None
            if worker is not None:
                worker.close()


def send_message(link: socket.socket, content: bytes, *, timeout_s: float | None = None) -> None:
    """Send bytes with their length before them. Raises OSError if the other end is gone or does not read in time."""
    link.settimeout(None if timeout_s is None else max(timeout_s, 0.001))
    link.sendall(len(content).to_bytes(8, "big") + content)


def receive_message(link: socket.socket, *, end: float | None = None) -> bytes:
    """Return the bytes that the other end sent, by a moment of ``time.monotonic()``.

    Raises:
        EOFError: the other end is closed.
        TimeoutError: they did not come in time.
    """

    def exactly(count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            link.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
            part = link.recv(min(count, _CHUNK))
            if not part:
                raise EOFError("the other end is closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    return exactly(int.from_bytes(exactly(8), "big"))


def run_child(link: int, lifeline: int, limits: dict[str, int | None]) -> None:
    """Run the child: set its limits, then call the function that it is sent."""
    for descriptor in (link, lifeline):
        os.set_inheritable(descriptor, False)
    end_with_parent(lifeline)
    _set_limits(**limits)
    with socket.socket(fileno=link) as connection:
        function, args = pickle.loads(receive_message(connection))
        function(connection, *args)


def serve(link: socket.socket) -> None:
    """Answer calls in a child of a pool, one after the other, in the main thread."""
    with contextlib.suppress(EOFError):
        while True:
            send_message(link, _reply(receive_message(link)))


def _reply(request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
    except Exception as error:  # reading an argument runs code of its type, whose module may be missing here
        return pickle.dumps(("arguments", str(error)))
    try:
        reply = ("returned", function(*args))
    except Exception as error:  # raised again in the caller
        reply = ("raised", error)
    try:
        return pickle.dumps(reply)
    except Exception as error:
        return pickle.dumps(("result", str(error)))


def _pickle_request(function: Callable[..., Any], args: Sequence[Any]) -> bytes | WorkerError:
    try:
        return pickle.dumps((function, tuple(args)))
    except Exception as error:  # pickling an argument runs code of its type
        return WorkerError("arguments", str(error))


def end_with_parent(lifeline: int) -> None:
    """Have the process group killed when the other end of a pipe, which carries no data, is closed."""
    if not hasattr(fcntl, "F_SETSIG"):  # on other systems than Linux: not while other code holds Python's lock
        threading.Thread(target=lambda: os.read(lifeline, 1) or os.killpg(0, signal.SIGKILL), daemon=True).start()
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)  # it had already ended


def _set_limits(memory_mb: int | None, file_mb: int | None) -> None:
    for kind, limit_mb in ((resource.RLIMIT_AS, memory_mb), (resource.RLIMIT_FSIZE, file_mb)):
        if limit_mb is not None:
            resource.setrlimit(kind, (limit_mb << 20, limit_mb << 20))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
