"""Requests to an active run: files in its directory, which it checks for between steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lachesis.common.deadline import Deadline, paused
from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.metrics.names import format_seconds
from lachesis.run.directory import RunDirectory

logger = logging.getLogger("lachesis")

Request = Literal["stop", "checkpoint", "pause"]


def ask(run_dir: Path, request: Request) -> None:
    """Ask the run in a directory to stop after its step, save a checkpoint, or pause until the request is removed.

    Raises OSError.
    """
    write_atomic(run_paths(run_dir)["requests"] / request, "")


def is_asked(run_dir: Path, request: Request) -> bool:
    """Return True if the request is pending."""
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


# Seconds between checks for a request to resume, stop or save a checkpoint during a pause.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class RequestedPause:
    """A pause of a run that lasts while its directory has the request.

    Args:
        run: the run directory; its state says that the run is paused.
        watch: called during the pause; an error that it raises ends the pause and the run.
        look_s: seconds between two looks.
    """

    run: RunDirectory
    watch: Callable[[], None]
    look_s: float = _LOOK_S

    def __call__(self, step: int, meanwhile: Callable[[], None]) -> None:
        """Wait while the request is pending. ``step`` is the last finished one; ``meanwhile`` is called at each look.

        Raises:
            What ``watch`` and ``meanwhile`` raise.
        """
        if not is_asked(self.run.path, "pause"):
            return
        logger.warning("paused after step %d, as requested; `lachesis watch %s` resumes it", step, self.run.path)
        self.run.update(status="paused", step=step)
        wait = Deadline("the requested pause", None)
        with wait.waiting(), paused():
            while is_asked(self.run.path, "pause"):
                self.watch()
                meanwhile()
                time.sleep(self.look_s)
        self.run.update(status="running")
        logger.warning("resumed at step %d after a pause of %s", step + 1, format_seconds(wait.elapsed_s()))
