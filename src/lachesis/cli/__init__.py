"""The command line: the only place that prints or exits."""

from __future__ import annotations

import os
import signal
import sys

import typer

from lachesis.cli import base
from lachesis.cli.base import EXIT_INTERNAL, EXIT_SIGNALLED, fail
from lachesis.cli.commands import load
from lachesis.common.errors import ConfigError, LachesisError, TrainingError
from lachesis.process.lost_threads import MEMORY_FULL, RoomForNumpy, lacks_memory, threads_watched
from lachesis.process.openmp import brief_waits

__all__ = ["main", "run_api_main"]


def __getattr__(name: str) -> typer.Typer:
    """Return ``app`` with all commands loaded; it is the module's only lazy attribute."""
    if name != "app":
        raise AttributeError(name)
    load()
    return base.app


def run_api_main() -> None:
    """Run the command ``run-api``, an entry point that means ``lachesis run-api``."""
    sys.argv[1:1] = ["run-api"]
    main()


def main() -> None:
    """Run the command line; print an error as one line with its cause and a remedy, and exit with its code."""
    os.environ |= brief_waits(os.environ)
    sys.meta_path.insert(0, RoomForNumpy)
    try:
        # Without standalone mode typer returns the exit code of typer.Exit or of an interrupt.
        words = sys.argv[1:] or ["--help"]
        load(None if "_LACHESIS_COMPLETE" in os.environ else words)
        with threads_watched():
            code = base.app(words, standalone_mode=False)
    except LachesisError as error:
        fail(str(error), error, code=error.exit_code)
    except typer.TyperException as error:
        fail(f"{error.format_message()} -> see lachesis --help", error, code=2)
    except BrokenPipeError:
        # The reader of our output has gone, so no message can reach it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_SIGNALLED + signal.SIGPIPE)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's error; torch is not loaded here
            remedy = "lower batch.max_tokens_per_microbatch, then see `lachesis plan CONFIG` for other uses of memory"
            fail(f"the device's memory is full: {error} -> {remedy}", error, code=TrainingError.exit_code)
        if isinstance(error, OSError) and error.filename is not None and not isinstance(error, FileNotFoundError):
            place = error.filename2 or error.filename
            remedy = "check this path, who may use it, and the room on its disk"
            fail(f"{place}: {error.strerror} -> {remedy}", error, code=ConfigError.exit_code)
        if lacks_memory(error):
            fail(MEMORY_FULL, error, code=TrainingError.exit_code)
        fail(
            f"{type(error).__name__}: {error} -> this is a bug in Lachesis or in a library; run again with "
            "`lachesis --traceback ...` and report it",
            error,
            code=EXIT_INTERNAL,
        )
    sys.exit(code)
