"""``lachesis env eval``: any environment by its id, tried with a served model, or with one that is served for it."""

from __future__ import annotations

import asyncio
import sys
import tempfile
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
from lachesis.plugins.atropos.environments.base import Environment
from lachesis.plugins.atropos.environments.evaluation import EnvironmentEvaluation, evaluate_environment
from lachesis.plugins.atropos.environments.settings import parse_options
from lachesis.plugins.atropos.environments.shipped import SHIPPED
from lachesis.plugins.atropos.episode_environments import EPISODES
from lachesis.plugins.environments.steps.openenv import is_address
from lachesis.process.managed import ManagedProcess
from lachesis.rollouts.datasets.rows import PREFIX

_START_S = 600.0
_SAMPLES, _TASKS = 4, 32
# Tasks of an environment that is stepped, unless one of these flags says which there are.
_STEPPED = 1024
_HOW_MANY = ("--env.max_tasks", "--env.max-tasks", "--env.tasks")
# The short flags, and what they are among those of every environment.
_NAMES = {
    "--engine": "--openai.base_url",
    "--tasks": "--env.eval_num",
    "--temperature": "--env.temperature",
    "--max-tokens": "--env.max_new_tokens",
}
FLAGS = {
    "--engine URL": "the inference server that plays; or",
    "--model MODEL": "a directory or hub id, which the embedded engine then serves for as long as it takes",
    "--tasks N": f"most problems ({_TASKS})",
    "--samples N": f"rollouts of each, at --temperature (1.0); pass@k is for k up to it ({_SAMPLES})",
    "--greedy": "one rollout of each, greedy",
    "--max-tokens N": "most tokens of a completion",
    "--json FILE": "write the result there; - is the standard output, without the table",
    "--env.FLAG VALUE": "any other flag of the environment, as --env.args '{...}'",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """Options of the command line; ``rest`` are flags of the environment."""

    samples: int = _SAMPLES
    greedy: bool = False
    model: str | None = None
    json: str | None = None
    rest: tuple[str, ...] = field(default_factory=tuple[str, ...])


def parse_trial(words: Sequence[str]) -> Trial:
    """Parse the options; leave unknown ones in ``rest``. Raises ConfigError if a flag lacks a value, or it is wrong."""
    own: dict[str, Any] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if flag == "--greedy":
            own["greedy"] = True
            continue
        if flag not in (*_NAMES, "--samples", "--model", "--json"):
            rest.append(f"{flag}{equals}{value}")
            continue
        if not equals and (not left or left[0].startswith("--")):
            raise ConfigError(f"{flag} needs a value", remedy=f"write {flag} VALUE")
        value = value if equals else left.pop(0)
        if flag in _NAMES:
            rest.append(f"{_NAMES[flag]}={value}")
        else:
            own[flag.removeprefix("--")] = value
    if not any(word.startswith("--env.eval_num") or word.startswith("--env.eval-num") for word in rest):
        rest.append(f"--env.eval_num={_TASKS}")
    samples = own.pop("samples", "1" if own.get("greedy") else str(_SAMPLES))
    if not samples.isdecimal() or int(samples) < 1:
        raise ConfigError(f"--samples is {samples!r}", remedy="give a whole number of 1 or more")
    return Trial(**own, samples=int(samples), rest=tuple(rest))


def resolve(name: str) -> tuple[type[Environment[Any, Any]], list[str]]:
    """Return the class of an environment by any kind of name, and the flags that identify it.

    A shipped name, ``FILE.py:CLASS`` or ``module.CLASS`` of ours or of a stepped one, the address of an OpenEnv
    server, ``reasoning_gym:TASKS``, and else the id or file of an environment of verifiers.
    """
    if name in (*SHIPPED, *EPISODES):
        return environments.find(name), []
    if name.startswith(PREFIX):
        return environments.find("reasoning_gym"), [f"--env.tasks={name.removeprefix(PREFIX)}"]
    if is_address(name):
        return EPISODES["steps"], [f"--env.environment={name}"]
    if ":" in name or ("." in name and not name.endswith(".py")):
        found: Any = load_function(name)
        if isinstance(found, type) and issubclass(found, Environment):
            return found, []
        if isinstance(found, type) and not hasattr(found, "reset") and not hasattr(found, "initial_observation"):
            raise ConfigError(
                f"{name} is not an environment",
                remedy="name a subclass of Environment, or a class that can be stepped (docs/environments.md)",
            )
        return EPISODES["steps"], [f"--env.environment={name}"]
    return EPISODES["verifiers"], [f"--env.environment={name}"]


def try_environment(name: str, trial: Trial) -> tuple[EnvironmentEvaluation | None, int]:
    """Return the evaluation, ``None`` if a signal came first, and the exit code.

    Raises:
        LachesisError: the environment, the model or the server is not available, or every rollout failed.
    """
    kind, flags = resolve(name)
    with ExitStack() as stack:
        words = [*flags, *trial.rest]
        if kind is EPISODES["steps"] and not any(word.startswith(_HOW_MANY) for word in words):
            words.append(f"--env.max_tasks={_STEPPED}")
        if trial.model is not None:
            words.append(f"--openai.base_url={_serve(trial.model, stack)}")
        options = parse_options(words, env_class=kind.config_class)
        return environments.run(kind, options, partial(_try, samples=trial.samples, greedy=trial.greedy))


async def _try(
    environment: Environment[Any, Any], stop: asyncio.Event, *, samples: int, greedy: bool
) -> EnvironmentEvaluation | None:
    async def whole() -> EnvironmentEvaluation:
        await environment.client.wait_until_ready()
        await environment.setup()
        return await evaluate_environment(environment, samples=samples, greedy=greedy)

    return await environments.unless(stop, whole())


def _serve(model: str, stack: ExitStack) -> str:
    """Start a server of the model, which ends with ``stack``, and return its address."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lachesis-eval-")))
    options = ServeOptions(model=model, engine="embedded", port=free_port())
    command = [sys.executable, "-m", "lachesis", "serve", *options.command_line()]
    server = ManagedProcess(command, url=options.url, log_path=directory / "engine.log")
    stack.callback(server.stop)
    server.start(deadline=Deadline(f"the start of a server of {model}", _START_S))
    return options.url
