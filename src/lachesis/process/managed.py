"""Managed child process, which this process starts, watches and stops."""

from __future__ import annotations

import atexit
import errno
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import httpx
import psutil

from lachesis.common.deadline import Deadline, Retry, wait_until
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError
from lachesis.common.http import server_url

_TAIL_BYTES = 64 << 10
_LINES, _CAUSES, _WIDTH = 12, 3, 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CAUSE = re.compile(r"\b\w*(Error|Exception)\b: .")
_REMEDIES: Mapping[str, str] = tomllib.loads(Path(__file__).with_name("remedies.toml").read_text(encoding="utf-8"))
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# Seconds that the supervisor itself may take, besides its command's grace.
_SUPERVISOR_S = 30.0
_HEALTH_S = 5.0
# Seconds for a killed process to disappear, which includes freeing GPU memory.
_REAP_S, _REAP_LOOK_S = 20.0, 0.02


def last_lines(path: Path, *, start: int = 0) -> list[str]:
    """Return the last lines from byte ``start`` on, after earlier ones that name an error, which is often the cause.

    Raises:
        EngineError: the log cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        raise EngineError(f"the log {path} cannot be read: {error.strerror}") from error
    # Only the last state of a progress bar.
    lines = [_COLOUR.sub("", line.rsplit("\r", 1)[-1]).rstrip()[:_WIDTH] for line in text.split("\n")]
    lines = [line for line in lines if line]
    end = lines[-_LINES:]
    causes = [line for line in lines[:-_LINES] if names_an_error(line)]
    return [*dict.fromkeys(causes[-_CAUSES:]), *end]


def names_an_error(line: str) -> bool:
    """Return True if a line of a log has one of Python's errors with its message."""
    return _CAUSE.search(line) is not None


def remedy_of(lines: Sequence[str], *, killed: bool) -> str:
    """Return the remedy for a server that ended with these lines; empty if none is known."""
    text = "\n".join(lines).lower()
    for sign, advice in _REMEDIES.items():
        if sign.lower() in text:
            return advice
    return "if nobody killed it, the machine ran out of memory: check its kernel log" if killed else ""


OnDeath = Callable[[EngineError], None]


class ManagedProcess:
    """Command in a separate process group; :mod:`lachesis.process.supervisor` explains how.

    However this process ends, kill -9 included, the command's group is ended too. Thread-safe, except that one
    thread at a time may start and stop.

    Args:
        log_path: its output is appended here.
        url: the address where it will listen; ``None`` if it does not: it is then ready once started.
        health: the path at ``url`` that answers when it is ready to serve.
        name: its name in messages; "the server at ``url``" if unset.
        env: added to this process's environment; ``None`` as a value removes a variable.
        grace_s: seconds that it may take to end before it is killed.
        on_death: called from another thread, once for each start, if it ends without a request.
        after: the process that has to be ready before it starts, if they start together (:func:`launch_together`).
        stdin: its standard input; empty if unset.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        url: str | None = None,
        health: str = "/health",
        name: str = "",
        env: Mapping[str, str | None] | None = None,
        grace_s: float = 20.0,
        on_death: OnDeath | None = None,
        after: ManagedProcess | None = None,
        stdin: socket.socket | None = None,
    ) -> None:
        self.after = after
        self._stdin = stdin
        self.command = tuple(map(str, command))
        self.url = None if url is None else server_url(url)
        self.name = name or f"the server at {self.url}"
        self.log_path = Path(log_path)
        self._health_url = None if self.url is None else f"{self.url}{health}"
        self._env = dict(env or {})
        self._grace_s = grace_s
        self._on_death = on_death
        self._life: _Life | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid of the command, which leads its process group; ``None`` while there is none."""
        life = self._life
        return None if life is None or life.ended.is_set() else life.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the last run, negative for a signal; ``None`` while it runs or if unknown."""
        life = self._life
        return life.code if life is not None and life.ended.is_set() else None

    def start(self, *, deadline: Deadline) -> None:
        """Start it and wait until it is ready to serve. If that fails, it is stopped again.

        Raises:
            EngineError: its port is taken, the command cannot be run, or it died; with the last lines of its log.
            DeadlineExceeded: it was not ready in time.
        """
        self.launch()
        try:
            self.wait_ready(deadline=deadline)
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start it without waiting for it. Raises EngineError as :meth:`start`."""
        if self._life is not None and not self._life.ended.is_set():
            raise EngineError(f"{self.name} runs already (pid {self.pid})", remedy="stop it first")
        if self.url is not None:
            check_port_free(self.url)
        environment = {key: value for key, value in {**os.environ, **self._env}.items() if value is not None}
        if shutil.which(self.command[0], path=environment.get("PATH")) is None:
            raise EngineError(
                f"the command {self.command[0]!r} of {self.name} does not exist",
                remedy="install it, or give its full path",
            )
        self._life = _Life(
            self.command,
            log_path=self.log_path,
            env=environment,
            grace_s=self._grace_s,
            died=self._died,
            stdin=self._stdin,
        )
        _running.add(self)

    def wait_ready(self, *, deadline: Deadline) -> None:
        """Wait until it is able to serve. Raises as :meth:`start`."""
        if self._health_url is None:
            return
        assert self._life is not None
        retry = Retry(deadline, first_s=0.05, longest_s=0.5)
        try:
            with httpx.Client(trust_env=False) as client:
                wait_until(lambda: self._why_not_ready(client), retry, sleep=self._life.ended.wait)
        except DeadlineExceeded as error:
            lines = last_lines(self.log_path, start=self._life.log_start)
            raise DeadlineExceeded(
                f"{error.message}; the end of its log {self.log_path}:{_shown(lines)}", remedy=error.remedy
            ) from error
        self.check()  # another server may have answered while this one died

    def _why_not_ready(self, client: httpx.Client) -> str:
        self.check()
        url = self._health_url or ""
        return "" if answers(client, url) else f"{url} does not answer, but pid {self.pid} is still running"

    def check(self) -> None:
        """Raise EngineError, with the last lines of the log, unless it runs."""
        if self._life is None or self._life.stopping or self._life.ended.is_set():
            raise self.death()

    def death(self) -> EngineError:
        """Return an error that says how the process ended, with the last lines of the log."""
        life = self._life
        if life is None or life.stopping:
            return EngineError(f"{self.name} was not started, or was stopped", remedy="start it")
        return self._death(life)

    def stop(self) -> None:
        """End its process group: SIGTERM, after ``grace_s`` SIGKILL. Idempotent."""
        life = self._life
        if life is not None:
            life.stop(timeout_s=self._grace_s + _SUPERVISOR_S)
        _running.discard(self)

    def _died(self, life: _Life) -> None:
        if self._on_death is not None:
            self._on_death(self._death(life))

    def _death(self, life: _Life) -> EngineError:
        lines = last_lines(self.log_path, start=life.log_start)
        return EngineError(
            f"{self.name} (pid {life.pid}, {shlex.join(self.command[:3])} ...) {life.ending()}; "
            f"the end of its log {self.log_path}:{_shown(lines)}",
            remedy=remedy_of(lines, killed=life.code == -signal.SIGKILL) or f"read {self.log_path}",
        )


def launch_together(processes: Iterable[ManagedProcess]) -> None:
    """Start the processes without waiting, except those that follow another.

    Raises EngineError as :meth:`ManagedProcess.launch`.
    """
    for process in processes:
        if process.after is None:
            process.launch()


def wait_together(processes: Iterable[ManagedProcess], *, deadline: Deadline) -> None:
    """Wait until all that were launched together are able to serve, each after its ``after``.

    Raises:
        EngineError, DeadlineExceeded: as :meth:`ManagedProcess.start`.
    """
    for process in processes:
        if process.after is not None:
            process.launch()
        process.wait_ready(deadline=deadline)


class _Life:
    """A run of the command, from its start to its end.

    ``code`` is Popen's: negative for a signal, ``None`` if unknown.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str],
        grace_s: float,
        died: Callable[[_Life], None],
        stdin: socket.socket | None,
    ) -> None:
        self.code: int | None = None
        self.stopping = False
        self.ended = threading.Event()
        self._owner = os.getpid()
        self._started = time.monotonic()
        self._lifetime_s = 0.0
        self._died = died
        self._link, theirs = socket.socketpair()
        with theirs, _open_log(log_path) as log:
            self.log_start = log.seek(0, os.SEEK_END)
            arguments = map(str, [theirs.fileno(), self._owner, grace_s, *command])
            # -I and -S: only the standard library is needed, and this keeps the start fast.
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), *arguments],
                env=dict(env),
                stdin=subprocess.DEVNULL if stdin is None else stdin.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lines = self._link.makefile("r")
        self.pid = self._first_word(command)
        self._server = _process(self.pid)
        threading.Thread(target=self._watch, name=f"lachesis-process-{self.pid}", daemon=True).start()

    def _first_word(self, command: Sequence[str]) -> int:
        """Return the pid that the supervisor reports.

        Raises EngineError if it could not run the command, or is silent.
        """
        self._link.settimeout(_SUPERVISOR_S)
        try:
            word, _, value = self._lines.readline().strip().partition(" ")
        except TimeoutError:
            word, value = "failed", f"its supervisor said nothing for {_SUPERVISOR_S:g} s"
        if word == "started":
            self._link.settimeout(None)
            return int(value)
        self._link.close()
        self._supervisor.kill()
        self._supervisor.wait()
        raise EngineError(
            f"the server's command {shlex.join(command[:3])} cannot be run: {value or 'its supervisor ended'}",
            remedy="correct the command",
        )

    def ending(self) -> str:
        """Describe how it ended."""
        after = f"{self._lifetime_s:.1f} s after its start"
        if self.code is None:
            return f"lost its supervisor {after} and was killed"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name} {after}"
        return f"ended with exit code {self.code} {after}"

    def stop(self, *, timeout_s: float) -> None:
        # A forked copy of this process has the object too, but must not stop the server.
        if os.getpid() != self._owner:
            return
        self.stopping = True
        with suppress(OSError):  # it has ended
            self._link.shutdown(socket.SHUT_WR)
        if not self.ended.wait(timeout_s):
            self._kill()
            self.ended.wait(_SUPERVISOR_S)

    def _watch(self) -> None:
        with suppress(ConnectionError):  # counts as the end of the stream
            for line in self._lines:
                word, _, value = line.partition(" ")
                if word == "exited":
                    self.code = int(value)
        # End of the stream: the supervisor has ended, or was killed and can no longer end anything.
        if self.code is None:
            self._kill()
        self._supervisor.wait()
        self._lifetime_s = time.monotonic() - self._started
        self._link.close()
        self.ended.set()
        if not self.stopping:
            self._died(self)

    def _kill(self) -> None:
        """Kill the command's group without the supervisor's help, and wait until it is gone.

        The group is killed only if it is still the one that we started.
        """
        if self._supervisor is not None:
            self._supervisor.kill()
        if self.pid is None:  # nothing has been forked
            return
        leader = _process(self.pid)
        if leader is not None and leader != self._server:
            return  # another process has got that pid, so the group has ended
        with suppress(ProcessLookupError):  # it ended by itself just now
            os.killpg(self.pid, signal.SIGKILL)
        # Only our children's ends are reported to us; a port, or a GPU's memory, is free once all have ended.
        until = time.monotonic() + _REAP_S
        while _has_members(self.pid) and time.monotonic() < until:
            time.sleep(_REAP_LOOK_S)


def _open_log(path: Path) -> IO[bytes]:
    """Open a log for a process to append to; create missing parent directories.

    Raises:
        EngineError: the log cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise EngineError(
            f"the log {path} cannot be written: {error.strerror}", remedy="give another directory"
        ) from error


def check_port_free(url: str) -> None:
    """Raise EngineError, naming the process, if a process listens where a server will start.

    An address of another machine passes: its server will find out at its start.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", 80 if parts.port is None else parts.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"the host of {url} is not known: {error}", remedy="correct the address") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of a server that has just ended do not block its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return
            raise EngineError(
                f"port {port} of {host} is taken by {who_listens(port)}",
                remedy="stop that process if it is yours, or choose another port",
            ) from error


def who_listens(port: int) -> str:
    """Describe the process that listens on a port by pid and command, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid and tuple(connection.laddr)[1:2] == (port,):
                return f"pid {connection.pid} ({shlex.join(psutil.Process(connection.pid).cmdline()) or '?'})"
    except psutil.Error:
        pass
    return "a process of another user"


# This finds a process of that number on this machine, even of another user.
process_exists = psutil.pid_exists


def answers(client: httpx.Client, url: str) -> bool:
    """Return True if a server is ready to serve, according to its health route."""
    try:
        return client.get(url, timeout=_HEALTH_S).is_success
    except httpx.TransportError:
        return False


def _shown(lines: Sequence[str]) -> str:
    return "".join(f"\n  | {line}" for line in lines) or " (nothing)"


def _process(pid: int) -> psutil.Process | None:
    """Return the process with its start time, which distinguishes it from a later one with the same pid."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _has_members(group: int) -> bool:
    """Return True if a process of the group has not ended.

    A zombie counts as ended once no thread of it is left to close files.
    """
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and (
                process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
            ):
                return True
    return False


_running: weakref.WeakSet[ManagedProcess] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for process in list(_running):
        process.stop()
