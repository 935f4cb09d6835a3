"""Shared parts of all commands: the application, the consoles, signals and errors."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.text import Text

from lachesis.cli.commands import Commands
from lachesis.common.chatter import hide_progress_bars
from lachesis.common.errors import LachesisError, StopRequested, TrainingError
from lachesis.common.terminal import SafeConsole
from lachesis.common.types import Finding
from lachesis.common.version import __version__
from lachesis.common.world import World, find_world
from lachesis.process.signals import keep_handlers_from_children
from lachesis.process.watchdog import end_held_after_signals

if TYPE_CHECKING:
    from lachesis.config.load import LoadedConfig
    from lachesis.run.train import RunSummary

app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lachesis trains language models with GRPO.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Console(SafeConsole):
    """A console that raises BrokenPipeError if its reader has gone: the sink is dropped and training continues."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


# No markup and no emoji codes: paths and messages are printed as they are.
console = _Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
error_console = SafeConsole(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)

# Exit codes of processes that a signal ended, as in shells.
EXIT_SIGNALLED = 128
EXIT_INTERNAL = 70

# Flags that a command does not know are kept for the program it starts.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
# The same settings for a command with its own help.
ALL_WORDS = {**PASS_ON, "help_option_names": []}
HELP_FLAGS = {"--help", "-h"}

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in --set run.steps=10.")
]

Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete a run of that name first.")]
Ui = Annotated[bool, typer.Option("--ui", help="Show the run on a live page while it runs.")]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def common(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show an error's traceback.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Apply the options before the command."""
    Settings.traceback = traceback
    logging.getLogger("lachesis").addHandler(ConsoleHandler(logging.WARNING))


def quiet_libraries() -> None:
    """Keep library warnings that users can do nothing about off the screen; a run's log still has them."""
    logging.getLogger().addHandler(logging.NullHandler())
    # torch shows these when torchao is imported: a deprecation that concerns only these two.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    # vLLM's use of an old name in torch also concerns only these two.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # a bar for each split that datasets reads


# Not in `common`: the processes that vLLM spawns import the command line too, but run no command.
quiet_libraries()


class Settings:
    traceback = False


class ConsoleHandler(logging.Handler):
    """A log handler that prints warnings to standard error or, on a terminal, between the lines of a run."""

    def emit(self, record: logging.LogRecord) -> None:
        target = console if console.is_terminal else error_console
        target.print(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow")


@contextmanager
def printed_log(name: str, *, beginning: tuple[str, ...] = ("",)) -> Iterator[None]:
    """Print INFO messages of the logger ``name`` unchanged while the block runs.

    Args:
        beginning: prefixes; only messages that begin with one of them are printed.
    """
    handler, logger = _Printer(beginning), logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class _Printer(logging.Handler):
    def __init__(self, beginning: tuple[str, ...]) -> None:
        super().__init__(logging.INFO)
        self._beginning = beginning

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno == logging.INFO and message.startswith(self._beginning):
            console.print(message)


def fail(message: str, error: BaseException, *, code: int) -> NoReturn:
    if Settings.traceback:
        error_console.print_exception()
    first, *rest = message.splitlines() or [""]
    # The reference goes into the same line, because the error must be the last line.
    hint = f"  (more: lachesis explain {code})" if error_console.is_terminal else ""
    error_console.print(Text.assemble((f"error: {first}", "red"), (hint, "dim")))
    for line in rest:
        error_console.print(f"  {line}")
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun shows its content as the cause
        cause = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": cause}), encoding="utf-8")
    sys.exit(code)


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Stop the run after the current step on SIGINT or SIGTERM, and at once on a second one; yield the signals."""
    received: list[int] = []

    def request(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        words = "stopping after this step, with a checkpoint; a second Ctrl-C or SIGTERM stops at once"
        error_console.print(words, style="yellow")

    keep_handlers_from_children()
    end_held_after_signals()
    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    except StopRequested as error:  # before the first step, there is nothing to save
        error_console.print(error.message, style="yellow")
        raise typer.Exit(EXIT_SIGNALLED + received[0] if received else 0) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def live_page(loaded: LoadedConfig, *, asked: bool) -> Iterator[None]:
    """Serve the page of ``lachesis watch`` while the block runs, if ``asked``, and print its address."""
    if not asked:
        yield
        return
    from lachesis.plugins.report.watch_server import beside

    with beside(loaded.config.run.directory) as words:
        console.print(f"live page: {words}")
        yield


def conclude(summary: RunSummary, stop: Sequence[int], command: Sequence[str]) -> None:
    """Print the last line of a run; if it was stopped, say how to resume it and exit.

    Args:
        stop: the signals received, from :func:`stop_on_signals`.
        command: the command line that started the run, without --resume.
    """
    if not summary.finished:
        # Without a signal it was a request of `lachesis watch`.
        name, code = (signal.Signals(stop[0]).name, EXIT_SIGNALLED + stop[0]) if stop else ("request", 0)
        if summary.steps:
            console.print(f"its last checkpoint as a model: lachesis export {shlex.quote(shown(summary.run_dir))}")
        console.print(f"stopped by {name} after step {summary.steps}; resume with: {shlex.join(command)} --resume")
        raise typer.Exit(code)
    if summary.pushed is not None:
        console.print(f"pushed: {summary.pushed}")
    report = shown(summary.report)
    if not summary.evaluations:
        console.print(f"{summary.steps} steps in {summary.seconds:.0f} s; report: {report}")
        return
    first, last = summary.evaluations[0], summary.evaluations[-1]
    console.print(
        f"held-out accuracy {first.accuracy:.2f} -> {last.accuracy:.2f} "
        f"({last.problems} problems, {summary.steps} steps, {summary.seconds:.0f} s); report: {report}"
    )


def world_of_leader() -> World | None:
    """Return the ranks that this process leads, or None if it is alone; a follower works in this call, then exits."""
    world = find_world(os.environ)
    if world is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(end=_end_process)
    if world is None or world.rank == 0:
        return world
    from lachesis.run.ranks import ToldLeader, follow

    hide_progress_bars()
    logging.getLogger("lachesis").setLevel(logging.ERROR)
    # The leader gets them too, and reports the outcome, as it does for errors.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(world, end_process=_end_process)
    except ToldLeader as error:
        if Settings.traceback:
            error_console.print_exception()
        raise typer.Exit(error.exit_code) from error
    raise typer.Exit


def end_with_parent(
    *, end: Callable[[LachesisError], None], parent: Callable[[], int] = os.getppid, every_s: float = 0.2
) -> threading.Thread:
    """Call ``end`` from another thread once torchrun, which started this process, is gone, however it ended.

    torchrun stops its ranks if it can. If it was killed, they would continue and hold GPUs that the next run needs.
    """
    started_by = parent()

    def watch() -> None:
        while parent() == started_by:
            time.sleep(every_s)
        end(TrainingError(f"torchrun (process {started_by}) has ended, so its ranks end too", remedy="start it again"))

    thread = threading.Thread(target=watch, name="lachesis-parent", daemon=True)
    thread.start()
    return thread


def _end_process(error: LachesisError) -> None:
    """End the process from a thread other than the waiting one; the leader reports its own errors itself."""
    from lachesis.run.ranks import ToldLeader

    if not isinstance(error, ToldLeader):
        error_console.print(f"error: {error}", style="red")
    os._exit(error.exit_code)


def busy(doing: str) -> AbstractContextManager[object]:
    """Return a context in which a terminal shows ``doing`` with a spinner."""
    return console.status(doing) if console.is_terminal else nullcontext()


def shown(path: Path) -> str:
    """Return ``path`` as a user would type it: relative to the current directory if it lies below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


_COLOURS = {"problem": "red", "warning": "yellow", "note": "dim"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding on a line; exit with code 1 if one is a problem."""
    for finding in findings:
        console.print(Text.assemble((f"{finding.level:<8}", _COLOURS[finding.level]), f"  {finding.message}"))
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)
