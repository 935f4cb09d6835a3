"""The run directory: its files, its state, and the lock that keeps other processes from writing there."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from lachesis.common.deadline import Wait, waits_now, waits_writers
from lachesis.common.errors import CheckpointError, ConfigError, LachesisError, RunRemoved
from lachesis.common.files import clean_files, write_atomic
from lachesis.common.json_values import is_object
from lachesis.common.run_files import run_paths
from lachesis.config.schema import LachesisConfig
from lachesis.engines.fleet import EngineRow
from lachesis.metrics.sinks.jsonl import read_metrics

logger = logging.getLogger("lachesis")

# Seconds that a wait must last to appear in live.json, and the interval at which live.json is rewritten without
# changes, as a sign of life.
_WORTH_NAMING_S = 1.0
_SIGN_OF_LIFE_S = 30.0
# A process with the run's pid is another one if it began later than the run by more than this (clock corrections).
CLOCK_SLACK_S = 60.0
# The values of status in state.json for a run that has not ended.
UNDER_WAY = ("starting", "running", "paused")
# Written by an engine while a run is being built (see engines.bridge_file, not imported here: it loads torch). If
# building fails, only this file is left.
LEFT_BEHIND = "vllm_bridge_config.json"
# Directories that bridges write before the first step, with the initial adapter or model.
_EXCHANGED = ("adapters", "exports")
# A run stopped before its first step saves the initial model.
_UNTRAINED = "step_000000"
# Saving a model replaces the whole directory, including this file.
_STEP_FILE = "lachesis.json"


@dataclass
class RunDirectory:
    """A directory with ``config.yaml``, ``metrics.jsonl``, ``rollouts/`` and so on; state.json has the run's status."""

    path: Path
    state: dict[str, Any] = field(default_factory=dict)
    # An open descriptor of the directory once the run has begun; None before.
    _place: int | None = field(default=None, repr=False, compare=False)
    # The training loop writes the step, other threads the status.
    _updating: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def files(self) -> dict[str, Path]:
        """Return the paths of the run's files by name."""
        return run_paths(self.path)

    def begin(self, *, resume: bool) -> None:
        """Make the directory, and delete files of an earlier run unless this run resumes it.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            if self.path.is_dir() and not resume:
                _empty(self.path)
                self.state = {}
            self.state.pop("error", None)
            self.files["logs"].mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.files["requests"], ignore_errors=True)  # requests to an earlier process
            for written in (self.path, self.files["evaluations"]):  # the sink of rollouts cleans its own directory
                if written.is_dir():
                    clean_files(written)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        now = time.time()
        # Held open, so that a directory made in its place cannot get its inode number.
        self._place = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self.update(
            status="starting",
            pid=os.getpid(),
            host=socket.gethostname(),
            started=self.state.get("started", now),
            began=now,
        )

    def update(self, **changes: Any) -> None:
        """Change state.json.

        Raises:
            CheckpointError: it cannot be written.
        """
        with self._updating:
            if self._place is not None and not self.path.is_dir():  # writing would make it again, with only this file
                raise _removed(self.path)
            self.state |= changes | {"updated": time.time()}
            try:
                write_atomic(self.files["state"], json.dumps(self.state, indent=2) + "\n")
            except OSError as error:
                raise cannot_write(self.path, error) from error

    def check_there(self) -> None:
        """Raise RunRemoved if the directory, or what is written in it at each step, is not the one that was begun."""
        if self._place is None:
            return
        try:
            if not os.path.samestat(os.fstat(self._place), self.path.stat()):  # made again
                raise _removed(self.path)
            for name in ("state", "metrics"):
                self.files[name].stat()
        except FileNotFoundError as error:
            raise _removed(self.path) from error
        except OSError:  # the code that writes there reports a file system that hangs or denies access
            return


@contextmanager
def live_file(
    path: Path, *, every_s: float = 1.0, engines: Callable[[], Sequence[EngineRow]] = tuple
) -> Iterator[None]:
    """Write this process's current wait to ``live.json``, every ``every_s`` seconds, from a thread.

    The state of several ``engines`` is written too. The file is rewritten when any of these changes, even while the
    caller is blocked, and removed at the end. A killed process leaves it behind, with its last wait.
    """
    ended = threading.Event()
    loop = threading.get_ident()
    said: list[Any] = []

    def write_now() -> None:
        with suppress(OSError):  # the thread logs it
            _write_live(path, waits_now(), loop=loop, engines=engines())
        said.clear()

    def keep() -> None:
        said_at = 0.0
        while True:
            waits = tuple(wait for wait in waits_now() if wait.deadline.elapsed_s() >= _WORTH_NAMING_S)
            rows = engines()
            saying = [waits, [(row.url, row.state, row.version) for row in rows]]
            if saying != said or time.monotonic() - said_at >= _SIGN_OF_LIFE_S:
                said[:] = saying
                try:
                    _write_live(path, waits, loop=loop, engines=rows)
                except OSError as error:
                    words = "%s cannot be written, so `lachesis status` cannot show what the run waits for: %s"
                    logger.warning(words, path, error)
                    return
                said_at = time.monotonic()
            if ended.wait(every_s):
                return

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    waits_writers.append(write_now)
    try:
        yield
    finally:
        waits_writers.remove(write_now)
        ended.set()
        thread.join(timeout=5.0)  # longer only where the disk hangs
        with suppress(OSError):  # if it stays, readers see that the run has ended and ignore it
            path.unlink(missing_ok=True)


def _write_live(path: Path, waits: tuple[Wait, ...], *, loop: int, engines: Sequence[EngineRow]) -> None:
    now = time.time()
    lines = [
        {
            "name": wait.deadline.name,
            "since": now - wait.deadline.elapsed_s(),
            "limit_s": wait.deadline.limit_s,
            "setting": wait.deadline.setting,
            "background": wait.thread != loop,
        }
        for wait in waits
    ]
    path.parent.stat()  # do not make a removed run directory again
    # Whole or not at all for readers, but not forced to disk: a power cut takes the process with it.
    content = {"pid": os.getpid(), "time": now, "waits": lines, "engines": [asdict(row) for row in engines]}
    write_atomic(path, json.dumps(content) + "\n", durable=False)


def run_directory(config: LachesisConfig) -> Path:
    """Return the absolute path of the run's directory."""
    return Path(os.path.abspath(config.run.directory))


def engine_log(directory: Path) -> Path:
    """Return the path of the servers' log before the run directory exists: a file beside it."""
    return Path(os.path.abspath(directory.parent)) / f".{directory.name}.engine.log"


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a run directory that cannot be written."""
    if isinstance(error, FileNotFoundError) and not path.is_dir():
        return _removed(path)
    return CheckpointError(
        f"the run directory {path} cannot be written: {error.strerror}",
        remedy="choose another run.dir, or free space on that disk",
    )


def _removed(path: Path) -> RunRemoved:
    return RunRemoved(
        f"the run directory {path} was removed during the run",
        remedy="leave it in place until the run has ended; start again, with --resume if checkpoints are left",
    )


def _empty(path: Path) -> None:
    """Remove everything in a directory, but not the directory itself: it may be a mount point."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def only_trainer(path: Path) -> Iterator[None]:
    """Keep other processes on this file system from training in a directory, which need not exist yet.

    A lock beside the directory says so, or on it where nothing can be written beside it. It ends with the process.

    Raises:
        ConfigError: another process holds the lock.
    """
    new = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
    lock = path.with_name(f".{path.name}.lock")
    held = _lock(lock) or _lock(path)
    try:
        yield
    finally:
        if held is not None:
            if held.path == lock:
                lock.unlink(missing_ok=True)
            os.close(held.descriptor)
        for parent in new:
            with suppress(OSError):  # usually no longer empty
                parent.rmdir()


@dataclass(frozen=True, slots=True)
class _Lock:
    path: Path
    descriptor: int


def _lock(path: Path) -> _Lock | None:
    """Lock a directory, or a file, which is created; return None without lock support. Raise ConfigError if held."""
    while True:
        try:
            if path.is_dir():
                descriptor = os.open(path, os.O_RDONLY)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                if not path.is_dir():
                    os.truncate(descriptor, 0)
                    os.write(descriptor, str(os.getpid()).encode())
                return _Lock(path, descriptor)
        except BlockingIOError as error:
            holder = "" if path.is_dir() else os.pread(descriptor, 20, 0).decode("ascii", "replace")
            os.close(descriptor)
            where = path if path.is_dir() else path.with_name(path.name.removeprefix(".").removesuffix(".lock"))
            raise ConfigError(
                f"process {holder or 'another one'} is starting or training a run in {where} right now",
                remedy="wait for it, or choose another run.name",
            ) from error
        except OSError as error:  # a file system without locks
            os.close(descriptor)
            logger.warning("%s cannot be locked (%s): do not start two runs in it at once", path, error.strerror)
            return None
        os.close(descriptor)  # its last holder removed it in the meantime


def claim_run(path: Path, *, resume: bool, overwrite: bool) -> RunDirectory:
    """Check that a run may use a directory; nothing is written or deleted.

    Raises:
        ConfigError: it holds a run that has trained, and neither ``resume`` nor ``overwrite`` is set; it holds other
            files; a process trains in it; or there is nothing to resume.
    """
    run = RunDirectory(path)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file, not a run directory", remedy="choose another run.name or run.dir")
    holds_run = run.files["state"].is_file()
    saved = any(run.files["checkpoints"].glob("step_*"))
    goes_by_checkpoints = resume and saved
    if holds_run:
        run.state = _read_state(run.files["state"], needed=not (goes_by_checkpoints or overwrite), saved=saved)
        _refuse_running(run)
    elif goes_by_checkpoints:
        logger.warning("%s is missing: the run resumes from its checkpoints", run.files["state"])
        holds_run = True
    if resume:
        if not holds_run:
            raise ConfigError(f"there is no run to resume in {path}", remedy="leave out --resume to start a new run")
        if run.state.get("status") == "finished" and not goes_by_checkpoints:
            raise ConfigError(
                f"the run in {path} finished at step {run.state.get('step', 0)} and has no checkpoint to resume from",
                remedy="start over with --overwrite, or choose another run.name",
            )
        return run
    # A start that failed for lack of disk space leaves empty directories.
    if path.is_dir() and any(not entry.is_dir() and entry.name != LEFT_BEHIND for entry in path.rglob("*")):
        if not holds_run:
            raise ConfigError(f"{path} is not empty and holds no run", remedy="choose another run.name or run.dir")
        if not overwrite and not _has_no_step(run):
            raise ConfigError(
                f"{path} holds a run already ({run.state.get('status')} at step {run.state.get('step', 0)})",
                remedy="resume with --resume, start over with --overwrite, or choose another run.name",
            )
    return run


def _has_no_step(run: RunDirectory) -> bool:
    """Return True if a run ended before its first step and the directory has only files that it wrote until then."""
    state, files = run.state, run.files
    if state.get("status") in UNDER_WAY and state.get("host") != socket.gethostname():
        return False  # it may resume there
    known = {path.name for path in files.values()} | {LEFT_BEHIND, "wandb", "api", *_EXCHANGED}
    if any(entry.name not in known for entry in run.path.iterdir()) or files["final"].exists():
        return False
    saved = {entry.name for entry in files["checkpoints"].iterdir()} if files["checkpoints"].is_dir() else set[str]()
    if state.get("step", 0) != 0 or saved - {_UNTRAINED}:
        return False
    # metrics.jsonl is written at each step, state.json only once a second.
    return not (files["metrics"].is_file() and read_metrics(files["metrics"]).steps)


def _refuse_running(run: RunDirectory) -> None:
    pid = run.state.get("pid")
    if run.state.get("status") not in UNDER_WAY or not isinstance(pid, int) or pid == os.getpid():
        return
    here = run.state.get("host", socket.gethostname()) == socket.gethostname()
    if here and condition(pid, began=run.state.get("began")) != "gone":
        raise ConfigError(
            f"process {pid} is training in {run.path} right now", remedy="wait for it, or choose another run.name"
        )


def condition(pid: int, *, began: float | None) -> Literal["alive", "suspended", "gone"]:
    """Return the condition of the process ``pid`` of a run; a later process with the same id counts as gone.

    A zombie counts as gone, too: in some containers the first process does not reap killed processes.
    """
    try:
        process = psutil.Process(pid)
        other = (
            process.create_time() > began + CLOCK_SLACK_S if began else "lachesis" not in " ".join(process.cmdline())
        )
        if other:
            return "gone"
        status = process.status()
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # the last two: not a valid process id
        return "gone"
    except psutil.AccessDenied:
        return "alive"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "suspended" if status == psutil.STATUS_STOPPED else "alive"


def _read_state(path: Path, *, needed: bool, saved: bool) -> dict[str, Any]:
    """Return the content of state.json; if it is damaged and not ``needed``, nothing, with a warning."""
    try:
        state = json.loads(path.read_text())
        if is_object(state):
            return dict(state)
        reason = f"it holds a JSON value of type {type(state).__name__}, not an object"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    if needed:
        raise ConfigError(
            f"{path} cannot be read: {reason}",
            remedy=f"{'resume from the checkpoints with --resume, or ' if saved else ''}start over with --overwrite",
        )
    logger.warning("%s is damaged (%s) and is ignored", path, reason)
    return {}


def note_step(model: Path, step: int) -> None:
    """Write the step of a model into its directory."""
    write_atomic(model / _STEP_FILE, json.dumps({"step": step}) + "\n")


def noted_step(model: Path) -> int | None:
    """Return the step of a saved model; ``None`` if it was not recorded.

    Raises:
        CheckpointError: the file is malformed.
    """
    path = model / _STEP_FILE
    if not path.exists():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not give the model's step ({type(error).__name__}: {error})",
            remedy='write {"step": N} into it, or remove it if the model is from the run\'s last step',
        ) from error


class LogFile(logging.FileHandler):
    """A log file that ignores a full disk; its messages are also shown on the screen."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def reason_of(failure: BaseException) -> str:
    """Describe the failure that ended the run."""
    if isinstance(failure, KeyboardInterrupt):
        return "it was stopped at once by a second signal, without a checkpoint of its current step"
    return str(failure) if isinstance(failure, LachesisError) else f"{type(failure).__name__}: {failure}"
