"""Requests to a running run: files in its directory, which it looks for between its steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths

Request = Literal["stop", "checkpoint", "pause"]


def ask(run_dir: Path, request: Request) -> None:
    """Ask the run in a directory to stop after its step, to save a checkpoint, or to pause until it is taken back.

    Raises OSError.
    """
    write_atomic(run_paths(run_dir)["requests"] / request, "")


def is_asked(run_dir: Path, request: Request) -> bool:
    """Return True if the request was made and not yet taken."""
    return (run_paths(run_dir)["requests"] / request).exists()


def take(run_dir: Path, request: Request) -> bool:
    """Remove a request; return True if there was one."""
    with suppress(FileNotFoundError):
        (run_paths(run_dir)["requests"] / request).unlink()
        return True
    return False


def either(*asked: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that returns True if any of ``asked`` does."""
    return lambda: any(one() for one in asked)
