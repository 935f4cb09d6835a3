"""The command line: the only place that prints or exits."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from lachesis import __version__
from lachesis.config.explain import explain
from lachesis.config.load import load_config
from lachesis.errors import LachesisError

app = typer.Typer(
    help="Lachesis trains language models with GRPO.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Console(Console):
    """Where the reader has gone it raises as other files do: a sink that fails is dropped, and training goes on."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


# No markup and no emoji codes: paths and messages are printed as they are.
console = _Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
error_console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)

# As shells report a process that a signal ended.
_EXIT_SIGNALLED = 128
_EXIT_INTERNAL = 70

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in --set run.steps=10.")
]


@app.callback()
def common(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error came from.")] = False,
) -> None:
    """Options before the command."""
    _Settings.traceback = traceback
    logging.getLogger("lachesis").addHandler(_ConsoleHandler(logging.WARNING))
    # Libraries warn of much that a user can do nothing about: that goes into the log of the run, not on the screen.
    logging.getLogger().addHandler(logging.NullHandler())
    # torch shows these itself, at the import of torchao: a deprecation that is between the two.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file with the configuration.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete a run of that name first.")] = False,
) -> None:
    """Train as a configuration says."""
    loaded = load_config(config, overrides=overrides or [])
    with console.status("loading torch and the model") if console.is_terminal else _nothing():
        from lachesis import run

        _hide_progress_bars()
    with _stop_on_signals() as stop:
        summary = run.train(
            loaded, resume=resume, overwrite=overwrite, console=console, stop_requested=lambda: bool(stop)
        )
    report = _shown(summary.report)
    if not summary.finished:
        name = signal.Signals(stop[0]).name
        command = shlex.join(["lachesis", "train", str(config), *(f"--set={item}" for item in overrides or [])])
        console.print(f"stopped by {name} after step {summary.steps}; go on with: {command} --resume")
        raise typer.Exit(_EXIT_SIGNALLED + stop[0])
    if not summary.evaluations:
        console.print(f"{summary.steps} steps in {summary.seconds:.0f} s; report: {report}")
        return
    first, last = summary.evaluations[0], summary.evaluations[-1]
    console.print(
        f"held-out accuracy {first.accuracy:.2f} -> {last.accuracy:.2f} "
        f"({last.problems} problems, {summary.steps} steps, {summary.seconds:.0f} s); report: {report}"
    )


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html of a run anew."""
    from lachesis.metrics.report import write_report

    console.print(f"report: {_shown(write_report(run_dir))}")


@app.command("explain")
def explain_command(key: Annotated[str, typer.Argument(help="A key, as optimizer.learning_rate or epsilon.")]) -> None:
    """Say what a configuration key means, its type and its default."""
    answer = explain(key)
    if answer.description:
        console.print(f"{answer.explanations[0].section}: {answer.description}\n")
    for found in answer.explanations:
        default = "required" if found.default is None else f"default {found.default}"
        kinds = f" (only with kind {' or '.join(found.kinds)})" if found.kinds else ""
        console.print(f"{found.path}: {found.type}, {default}{kinds}", style="bold")
        console.print(f"    {found.description}")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A configuration to check as well.")] = None,
    proof: Annotated[bool, typer.Option("--proof/--no-proof", help="Train a small model for about a minute.")] = True,
) -> None:
    """Check the installation and the devices, and prove in about a minute that training learns."""
    from lachesis import doctor as checks

    _hide_progress_bars()
    findings = checks.inspect_installation()
    if config is not None:
        findings += checks.inspect_config(config)
    if proof and not any(finding.failed for finding in findings):
        with console.status("training a small model") if console.is_terminal else _nothing():
            findings.append(checks.prove_learning())
    for finding in findings:
        mark = ("fail", "red") if finding.failed else ("ok  ", "green")
        console.print(Text.assemble(mark, f"  {finding.subject:<14}  {finding.message}"))
    if any(finding.failed for finding in findings):
        raise typer.Exit(1)


@app.command("run-api")
def run_api(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8002,
    state_dir: Annotated[Path | None, typer.Option(help="Keep what is queued here, across restarts.")] = None,
    max_queued_tokens: Annotated[int | None, typer.Option(help="Answer 429 instead of queueing more tokens.")] = None,
    max_body_mb: Annotated[float, typer.Option(help="Refuse larger bodies, in MiB, before or after inflating.")] = 64.0,
    strict: Annotated[bool, typer.Option("--strict", help="Set aside groups that no trainer could use.")] = False,
    ack_timeout: Annotated[
        float, typer.Option(help="Seconds until an unacknowledged batch is handed out again.")
    ] = 600,
    env_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which an environment counts no more.")
    ] = 300,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer for texts on the dashboard.")] = None,
) -> None:
    """Serve the rollout API that Atropos environments push to and trainers pull from."""
    from lachesis.api.server import ServerOptions, serve

    options = ServerOptions(
        host=host,
        port=port,
        state_dir=state_dir,
        max_queued_tokens=max_queued_tokens,
        max_body_mb=max_body_mb,
        strict=strict,
        ack_timeout_s=ack_timeout,
        env_timeout_s=env_timeout,
        tokenizer=tokenizer,
    )
    serve(options, on_ready=lambda url: console.print(f"rollout API at {url}, dashboard at {url}/dashboard"))


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__)


def run_api_main() -> None:
    """Entry point of the command ``run-api``, which is ``lachesis run-api``."""
    sys.argv[1:1] = ["run-api"]
    main()


def main() -> None:
    """Entry point: an error is one line with its cause and a remedy, and an exit code of its own."""
    # Read when torch is loaded, later. Threads that spin while they wait for each other make small models several
    # times slower as soon as anything else runs on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        # Without standalone mode typer returns the code of typer.Exit, and that of an interrupt.
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except LachesisError as error:
        _fail(str(error), error, code=error.exit_code)
    except typer.TyperException as error:
        _fail(f"{error.format_message()} -> see lachesis --help", error, code=2)
    except BrokenPipeError:
        # The reader of our output has gone; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_EXIT_SIGNALLED + signal.SIGPIPE)
    except Exception as error:
        _fail(
            f"{type(error).__name__}: {error} -> this is a fault of Lachesis or of a library; run again with "
            "`lachesis --traceback ...` and report it",
            error,
            code=_EXIT_INTERNAL,
        )
    sys.exit(code)


class _Settings:
    traceback = False


class _ConsoleHandler(logging.Handler):
    """Warnings go to standard error; on a terminal through the console of the live display, above it."""

    def emit(self, record: logging.LogRecord) -> None:
        target = console if console.is_terminal else error_console
        target.print(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow")


def _fail(message: str, error: BaseException, *, code: int) -> None:
    if _Settings.traceback:
        error_console.print_exception()
    first, *rest = message.splitlines() or [""]
    error_console.print(f"error: {first}", style="red")
    for line in rest:
        error_console.print(f"  {line}")
    sys.exit(code)


def _hide_progress_bars() -> None:
    """Those of transformers, over the loading and saving of weights."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """SIGINT or SIGTERM ask the run to stop after the current step; a second one stops it at once."""
    received: list[int] = []

    def request(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        error_console.print("stopping after this step, with a checkpoint; once more stops at once", style="yellow")

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _shown(path: Path) -> str:
    """A path as one would type it here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
