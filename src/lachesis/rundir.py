"""The run directory: where a run keeps its files, and who may write there."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lachesis.errors import CheckpointError, ConfigError
from lachesis.files import write_atomic
from lachesis.metrics.base import run_paths


@dataclass
class RunDirectory:
    """A directory with ``config.yaml``, ``metrics.jsonl``, ``rollouts/`` and so on; state.json says how it stands."""

    path: Path
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, Path]:
        """The files of the run by name."""
        return run_paths(self.path)

    def update(self, **changes: Any) -> None:
        """Change state.json."""
        self.state |= changes | {"updated": time.time()}
        write_atomic(self.files["state"], json.dumps(self.state, indent=2) + "\n")


def open_run(path: Path, *, resume: bool, overwrite: bool) -> RunDirectory:
    """Make a run's directory, or go on in one.

    Raises:
        ConfigError: it holds a run and neither ``resume`` nor ``overwrite`` says what to do with it; a process
            works in it; or there is nothing to resume.
        CheckpointError: it cannot be made.
    """
    run = RunDirectory(path)
    files = run.files
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file, not a run directory", remedy="choose another run.name or run.dir")
    holds_run = files["state"].is_file()
    if holds_run:
        run.state = _read_state(files["state"])
        _refuse_running(run)
    if resume and not holds_run:
        raise ConfigError(f"there is no run to resume in {path}", remedy="leave --resume out to start it")
    if path.is_dir() and any(path.iterdir()) and not resume:
        _clear(run, holds_run=holds_run, overwrite=overwrite)
    try:
        files["logs"].mkdir(parents=True, exist_ok=True)
        run.update(status="starting", pid=os.getpid(), started=run.state.get("started", time.time()))
    except OSError as error:
        raise CheckpointError(
            f"the run directory {path} cannot be written: {error.strerror}",
            remedy="choose another run.dir, or free space on that disk",
        ) from error
    return run


def _clear(run: RunDirectory, *, holds_run: bool, overwrite: bool) -> None:
    if not holds_run:
        raise ConfigError(f"{run.path} is not empty and holds no run", remedy="choose another run.name or run.dir")
    if not overwrite:
        raise ConfigError(
            f"{run.path} holds a run already ({run.state.get('status')} at step {run.state.get('step', 0)})",
            remedy="go on with --resume, start anew with --overwrite, or choose another run.name",
        )
    shutil.rmtree(run.path)
    run.state = {}


def _refuse_running(run: RunDirectory) -> None:
    pid = run.state.get("pid")
    if run.state.get("status") not in ("starting", "running") or not isinstance(pid, int) or pid == os.getpid():
        return
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return
    if "lachesis" in _command_line(pid):
        raise ConfigError(
            f"process {pid} is training in {run.path} right now", remedy="wait for it, or choose another run.name"
        )


def _command_line(pid: int) -> str:
    """What a process was started as; empty where that cannot be read (a pid may belong to another program by now)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", remedy="start anew with another run.name") from error
    return state if isinstance(state, dict) else {}
