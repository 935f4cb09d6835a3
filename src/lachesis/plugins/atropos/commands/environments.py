"""The command ``lachesis env``: serving, processing and evaluating an environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lachesis.cli.base import ALL_WORDS, HELP_FLAGS, app, console, printed_log
from lachesis.common.errors import ConfigError, did_you_mean

# Defaults of `lachesis env try`.
_LITTLE = ("--tasks=4", "--samples=2")

if TYPE_CHECKING:
    from lachesis.common.types import EvalResult
    from lachesis.plugins.atropos.environments.evaluation import EnvironmentEvaluation
    from lachesis.plugins.atropos.environments.process import Processed
    from lachesis.plugins.atropos.environments.runner import Summary
    from lachesis.plugins.atropos.environments.settings import EnvironmentConfig


@app.command(context_settings=ALL_WORDS)
def env(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A shipped environment, FILE.py:CLASS or module.CLASS.")] = "",
    command: Annotated[str, typer.Argument(help="serve, process or evaluate.")] = "--help",
) -> None:
    """List, try, serve, process or evaluate environments; `lachesis env NAME --help` lists the flags of one.

    `lachesis env list` lists the installed ones, and `lachesis env info ENV` says how to train on one. `lachesis env
    try ENV --engine URL` plays a few rollouts; `env eval` plays more and reports rewards, metrics, pass@k and failures.
    """
    if code := run_environment(name, command, context.args):
        raise typer.Exit(code)


def run_environment(name: str, command: str, words: Sequence[str]) -> int:
    """Run ``lachesis env NAME COMMAND`` with these flags, or print its help.

    Returns:
        the exit code: 0, or 128 and the number of the signal that ended it.

    Raises:
        ConfigError: an unknown name, command or flag.
        LachesisError: the environment failed.
    """
    from lachesis.plugins.atropos import run as environments
    from lachesis.plugins.atropos.environments.settings import parse_options

    if name in ("list", "info"):
        print_catalogue(name, command)
        return 0
    if name in ("eval", "try"):
        return try_environment(command, words if name == "eval" else (*_LITTLE, *words))
    if not name or HELP_FLAGS & {name, command, *words}:
        print_help(name)
        return 0
    kind = environments.find(name)
    commands: dict[str, tuple[environments.Command[Any, Any], Any]] = {
        "serve": (environments.serve, _served),
        "process": (environments.make_groups, _processed),
        "evaluate": (environments.evaluate, _evaluated),
    }
    if command not in commands:
        remedy = did_you_mean(command, commands, otherwise=f"known are {', '.join(commands)}")
        raise ConfigError(f"unknown command {command!r} of the environment {name}", remedy=remedy)
    options = parse_options(words, env_class=kind.config_class)
    work, in_words = commands[command]
    with printed_log("lachesis.plugins.atropos.environments"):
        result, code = environments.run(kind, options, work)
    if result is not None:
        console.print(in_words(result))
    return code


def print_catalogue(command: str, name: str) -> None:
    """Print the installed environments, or the description of one. Raises ConfigError for an unknown one."""
    from lachesis.plugins.atropos import catalogue

    if command == "list":
        for one in catalogue.installed():
            console.print(f"{one.name:<34} {one.kind:<12} {one.about}", markup=False, highlight=False, soft_wrap=True)
        return
    one = catalogue.described(name)
    words = f"{one.name} ({one.kind})\n{one.about}\n\nTry it:    lachesis env try {one.name} --model MODEL"
    console.print(f"{words}\nTrain on it:\n{one.keys}", markup=False, highlight=False, soft_wrap=True)


def try_environment(name: str, words: Sequence[str]) -> int:
    """Run ``lachesis env eval NAME`` with these flags, or print its help; returns and raises as the others."""
    from lachesis.plugins.atropos import evaluate as env_eval

    if HELP_FLAGS & {name, *words}:
        console.print(env_eval.trial_parser().format_help(), markup=False, highlight=False)
        if name not in HELP_FLAGS:
            print_flags(name, env_eval.resolve(name)[0].config_class)
        return 0
    asked = env_eval.parse_trial(words)
    with printed_log("lachesis.plugins.atropos.environments"):
        result, code = env_eval.try_environment(name, asked)
    if result is not None:
        document = json.dumps(result.document(), indent=2)
        if asked.json == "-":
            sys.stdout.write(document + "\n")
            return code
        if asked.json is not None:
            Path(asked.json).write_text(document + "\n")
        for label, value in _tried(result):
            console.print(f"{label:<28} {value}", markup=False, highlight=False)
    return code


def _tried(result: EnvironmentEvaluation) -> list[tuple[str, str]]:
    """Return the rows of the table."""
    rows = [
        (result.environment, f"{result.problems} problems, {result.rollouts} rollouts, {result.seconds:.1f} s"),
        ("mean reward", f"{result.mean_reward:.3f}"),
        *((f"pass@{k}", f"{value:.3f}") for k, value in result.pass_at.items()),
        *((name, f"{value:.3f}") for name, value in result.metrics.items()),
        ("tokens of a rollout", f"{result.mean_length:.1f}"),
    ]
    return [*rows, *((f"failed: {cause}", str(count)) for cause, count in sorted(result.failures.items()))]


def _served(summary: Summary) -> str:
    counters = summary.counters
    mean = f", mean score {counters.score_sum / counters.sequences:.3f}" if counters.sequences else ""
    aside = f", {counters.set_aside.total()} set aside" if counters.set_aside else ""
    return f"{counters.groups} groups sent{aside} until step {summary.step}{mean}; {summary.ended}"


def _processed(done: Processed) -> str:
    mean = done.counters.score_sum / done.counters.sequences
    return f"{done.counters.groups} groups, mean score {mean:.3f}: {done.rollouts}; to read them: {done.page}"


def _evaluated(result: EvalResult) -> str:
    return (
        f"accuracy {result.accuracy:.3f}, mean score {result.mean_reward:.3f} on {result.problems} held-out problems "
        f"({result.mean_length:.1f} tokens each, {result.seconds:.1f} s)"
    )


def print_help(name: str) -> None:
    """Print the command's usage, with one environment's flags or those that all share."""
    from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
    from lachesis.plugins.atropos.environments.shipped import SHIPPED
    from lachesis.plugins.atropos.run import find

    named = bool(name) and name not in HELP_FLAGS
    console.print("Usage: lachesis env NAME serve|process|evaluate [FLAGS], or lachesis env list, info, try, eval\n")
    console.print(f"NAME is one of {', '.join(SHIPPED)}, or your own FILE.py:CLASS or module.CLASS.")
    console.print(
        "serve sends rollouts to an API, process writes them to a file and a page, evaluate scores held-out problems."
    )
    print_flags(name if named else "", find(name).config_class if named else EnvironmentConfig)


def print_flags(name: str, section: type[EnvironmentConfig]) -> None:
    """Print the flags of an environment's section ``env``."""
    from lachesis.plugins.atropos.environments.settings import describe

    console.print(f"\nFlags{f' of {name}' if name else ''}; - and _ are alike:")
    for flag, default, meaning in describe(section):
        console.print(f"  {flag}{f' ({default})' if default else ''}: {meaning}")
