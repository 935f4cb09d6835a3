"""``lachesis env eval``: try any environment with a model that is served already, or is served for the trial."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from argparse import ArgumentError, ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError
from lachesis.common.http import free_port
from lachesis.common.imports import load_function
from lachesis.engines.options import ServeOptions
from lachesis.plugins.atropos import run as environments
from lachesis.plugins.atropos.environments.base import Environment, Evaluable
from lachesis.plugins.atropos.environments.evaluation import EnvironmentEvaluation, evaluate_environment
from lachesis.plugins.atropos.environments.settings import parse_options
from lachesis.plugins.atropos.environments.shipped import SHIPPED
from lachesis.plugins.atropos.episode_trials import StepsTrial, VerifiersTrial
from lachesis.plugins.environments.steps.openenv import is_address
from lachesis.process.managed import ManagedProcess
from lachesis.process.tasks import unless
from lachesis.rollouts.datasets.rows import PREFIX

_START_S = 600.0
_SAMPLES, _TASKS = 4, 32
# Number of tasks of a stepped environment, unless one of these flags gives them.
_STEPPED = 1024
_HOW_MANY = ("--env.max_tasks", "--env.max-tasks", "--env.tasks")


@dataclass(frozen=True, slots=True)
class Trial:
    """Options of the command line; ``rest`` are flags of the environment."""

    samples: int = _SAMPLES
    greedy: bool = False
    model: str | None = None
    json: str | None = None
    rest: tuple[str, ...] = field(default_factory=tuple[str, ...])


def trial_parser() -> ArgumentParser:
    """Return the parser of the flags; others are those of the environment, and left over."""
    parser = ArgumentParser(
        prog="lachesis env eval ENV",
        description="ENV is a shipped name, FILE.py:CLASS, reasoning_gym:TASKS, or an id of verifiers.",
        epilog="Any other flag of the environment may follow, as --env.args '{...}'.",
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
    )
    add = parser.add_argument
    add("--engine", metavar="URL", help="address of an inference server; or")
    add("--model", help="directory or hub id of a model for the embedded engine to serve")
    add("--tasks", metavar="N", help=f"most problems ({_TASKS})")
    add("--samples", metavar="N", type=int, help=f"rollouts of each problem; pass@k is for k up to this ({_SAMPLES})")
    add("--temperature", metavar="T", help="sampling temperature (1.0)")
    add("--greedy", action="store_true", help="one greedy rollout of each problem")
    add("--max-tokens", metavar="N", help="most tokens of a completion")
    add("--json", metavar="FILE", help="write the result to this file; - is standard output, without the table")
    return parser


def parse_trial(words: Sequence[str]) -> Trial:
    """Parse the options; leave unknown ones in ``rest``. Raises ConfigError if a flag lacks a value, or it is wrong."""
    try:
        asked, rest = trial_parser().parse_known_args(words)
    except ArgumentError as error:
        raise ConfigError(str(error), remedy="see `lachesis env eval --help`") from error
    samples = asked.samples if asked.samples is not None else 1 if asked.greedy else _SAMPLES
    if samples < 1:
        raise ConfigError(f"--samples is {samples}", remedy="give a whole number of 1 or more")
    if asked.tasks is None and not any(word.startswith(("--env.eval_num", "--env.eval-num")) for word in rest):
        asked.tasks = _TASKS
    flags = {
        "--openai.base_url": asked.engine,
        "--env.eval_num": asked.tasks,
        "--env.temperature": asked.temperature,
        "--env.max_new_tokens": asked.max_tokens,
    }
    known = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    return Trial(samples, asked.greedy, asked.model, asked.json, (*known, *rest))


def resolve(name: str) -> tuple[type[Evaluable[Any, Any]], list[str]]:
    """Return the class that tries an environment by any kind of name, and the flags that identify it.

    The name is a shipped one, ``FILE.py:CLASS`` or ``module.CLASS`` of an Environment or a stepped class, the address
    of an OpenEnv server, ``reasoning_gym:TASKS``, or the id or file of an environment of verifiers.
    """
    if name in SHIPPED:
        return environments.find(name), []
    if name.startswith(PREFIX):
        return environments.find("reasoning_gym"), [f"--env.tasks={name.removeprefix(PREFIX)}"]
    if is_address(name):
        return StepsTrial, [f"--env.environment={name}"]
    if ":" in name or ("." in name and not name.endswith(".py")):
        found: Any = load_function(name)
        if isinstance(found, type) and issubclass(found, Environment):
            return found, []
        if isinstance(found, type) and not hasattr(found, "reset") and not hasattr(found, "initial_observation"):
            raise ConfigError(
                f"{name} is not an environment",
                remedy="name a subclass of Environment, or a class that can be stepped (docs/environments.md)",
            )
        return StepsTrial, [f"--env.environment={name}"]
    return VerifiersTrial, [f"--env.environment={name}"]


def try_environment(name: str, trial: Trial) -> tuple[EnvironmentEvaluation | None, int]:
    """Return the evaluation, ``None`` if a signal came first, and the exit code.

    Raises:
        LachesisError: the environment, the model or the server is not available, or every rollout failed.
    """
    kind, flags = resolve(name)
    with ExitStack() as stack:
        words = [*flags, *trial.rest]
        if kind is StepsTrial and not any(word.startswith(_HOW_MANY) for word in words):
            words.append(f"--env.max_tasks={_STEPPED}")
        if trial.model is not None:
            words.append(f"--openai.base_url={_serve(trial.model, stack)}")
        options = parse_options(words, env_class=kind.config_class)
        return environments.run(kind, options, partial(_try, samples=trial.samples, greedy=trial.greedy))


async def _try(
    environment: Evaluable[Any, Any], stop: asyncio.Event, *, samples: int, greedy: bool
) -> EnvironmentEvaluation | None:
    async def whole() -> EnvironmentEvaluation:
        await environment.client.wait_until_ready()
        await environment.setup()
        return await evaluate_environment(environment, samples=samples, greedy=greedy)

    return await unless(stop.wait(), whole())


def _serve(model: str, stack: ExitStack) -> str:
    """Start a server of the model, which ends with ``stack``, and return its address."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lachesis-eval-")))
    options = ServeOptions(model=model, engine="embedded", port=free_port())
    command = [sys.executable, "-m", "lachesis", "serve", *options.command_line()]
    server = ManagedProcess(command, url=options.url, log_path=directory / "engine.log")
    stack.callback(server.stop)
    server.start(deadline=Deadline(f"the start of a server of {model}", _START_S))
    return options.url
