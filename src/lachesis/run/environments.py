"""The composition root of environments: words of a command line in, a served, processed or evaluated one out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lachesis.common.errors import ConfigError, nearest
from lachesis.common.imports import load_function
from lachesis.common.types import Say
from lachesis.environments.base import Environment
from lachesis.environments.client import InferenceClient
from lachesis.environments.flags import EnvironmentOptions, describe, parse_options
from lachesis.environments.outputs import Outputs
from lachesis.environments.process import process
from lachesis.environments.rollout_api import RolloutApi
from lachesis.environments.runner import Runner
from lachesis.environments.shipped import SHIPPED
from lachesis.environments.tokenizer import load_tokenizer

T = TypeVar("T")

_GROUPS = 8
_HELP = ("--help", "-h")


def run(name: str, command: str, words: Sequence[str], *, say: Say) -> int:
    """Run ``lachesis env NAME serve|process|evaluate``.

    Args:
        name: a shipped environment, ``FILE.py:CLASS`` or ``module.CLASS``.
        command: what to do with it.
        words: its flags.
        say: prints a line.

    Returns:
        the exit code: 0, or 128 and the number of the signal that ended it.

    Raises:
        ConfigError: an unknown name, command or flag.
        LachesisError: what made the environment end.
    """
    if name in (*_HELP, "") or command in _HELP or any(word in _HELP for word in words):
        _help(name, say)
        return 0
    kind = find(name)
    commands: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
        "serve": _serve,
        "process": _process,
        "evaluate": _evaluate,
    }
    if command not in commands:
        near = nearest(command, commands)
        remedy = f"did you mean {near}?" if near else f"known are {', '.join(commands)}"
        raise ConfigError(f"unknown command {command!r} of the environment {name}", remedy=remedy)
    options = parse_options(words, env_class=kind.config_class)
    return asyncio.run(_with_environment(kind, options, commands[command], say))


def find(name: str) -> type[Environment[Any, Any]]:
    """The class of an environment.

    Raises:
        ConfigError: there is none of that name, or what is named is no environment.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    if ":" not in name and "." not in name:
        near = nearest(name, SHIPPED)
        remedy = f"did you mean {near}?" if near else f"known are {', '.join(SHIPPED)}, or give FILE.py:CLASS"
        raise ConfigError(f"unknown environment {name!r}", remedy=remedy)
    found: Any = load_function(name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(
            f"{name} is no environment", remedy="name a subclass of lachesis.environments.base.Environment"
        )
    return found


async def _with_environment(
    kind: type[Environment[Any, Any]],
    options: EnvironmentOptions,
    command: Callable[..., Coroutine[Any, Any, None]],
    say: Say,
) -> int:
    stop = asyncio.Event()
    client = InferenceClient(options.openai, slurm=options.slurm, say=say)
    environment: Environment[Any, Any] | None = None
    with _signals(stop) as received:
        try:
            environment = await _unless(stop, _build(kind, options, client))
            if environment is not None and command is _serve:
                # It ends by itself when it is asked to: what is finished is still sent.
                await _serve(environment, say=say, stop=stop)
            elif environment is not None:
                await _unless(stop, command(environment, say=say))
        finally:
            if environment is not None:
                await environment.close()
            await client.close()
    return 128 + received[0] if received else 0


async def _build(
    kind: type[Environment[Any, Any]], options: EnvironmentOptions, client: InferenceClient
) -> Environment[Any, Any]:
    name = options.env.tokenizer_name or options.openai.model_name
    if name is None:
        await client.wait_until_ready()
        name = await client.model_path()
    return kind(options.env, client=client, tokenizer=load_tokenizer(name))


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, which is cancelled when ``stop`` is set: then ``None``."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


async def _serve(environment: Environment[Any, Any], *, say: Say, stop: asyncio.Event) -> None:
    config = environment.config
    if config.max_num is not None:
        say(f"using the first {config.max_num} problems only (--env.max_num)")
    api = RolloutApi(config.rollout_server_url, wait_s=config.wait_timeout, say=say)
    outputs = _outputs(environment)
    try:
        summary = await Runner(environment, api=api, outputs=outputs, say=say).serve(stop=stop)
    finally:
        outputs.close()
        await api.close()
    tally = summary.tally
    mean = f", mean score {tally.score_sum / tally.sequences:.3f}" if tally.sequences else ""
    aside = f", {tally.set_aside.total()} set aside" if tally.set_aside else ""
    say(f"{tally.groups} groups sent{aside} until step {summary.step}{mean}; {summary.ended}")


async def _process(environment: Environment[Any, Any], *, say: Say) -> None:
    config = environment.config
    environment.config = config = config.model_copy(update={"include_messages": True})
    groups = config.total_steps if config.total_steps > 0 else _GROUPS
    path = config.data_path_to_save_groups or Path("data") / f"{environment.name}.jsonl"
    rollouts, page, tally = await process(environment, groups=groups, path=path, say=say)
    mean = tally.score_sum / tally.sequences
    say(f"{tally.groups} groups, mean score {mean:.3f}: {rollouts}; to read them: {page}")


async def _evaluate(environment: Environment[Any, Any], *, say: Say) -> None:
    outputs = _outputs(environment)
    try:
        await environment.setup()
        await environment.client.wait_until_ready()
        result = replace(await environment.evaluate(), step=0)
        outputs.evaluation(environment.config.wandb_name or environment.name, result)
    finally:
        outputs.close()
    say(
        f"accuracy {result.accuracy:.3f}, mean score {result.mean_reward:.3f} on {result.problems} held-out problems "
        f"({result.mean_length:.1f} tokens each, {result.seconds:.1f} s)"
    )


def _outputs(environment: Environment[Any, Any]) -> Outputs:
    config = environment.config
    return Outputs(
        log_dir=config.log_dir,
        groups_path=config.data_path_to_save_groups,
        evals_dir=config.data_dir_to_save_evals,
    )


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """SIGINT and SIGTERM set ``stop``; the list has those that came."""
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def request(number: int) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, request, number)
    try:
        yield received
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _help(name: str, say: Say) -> None:
    say("Usage: lachesis env NAME serve|process|evaluate [FLAGS]\n")
    say(f"NAME is one of {', '.join(SHIPPED)}, or FILE.py:CLASS or module.CLASS of your own.")
    say("serve sends rollouts to an API, process writes them to a file and a page, evaluate takes held-out problems.")
    kind = find(name) if name not in (*_HELP, "") else Environment
    say(f"\nFlags{f' of {name}' if kind is not Environment else ''}; - and _ are alike:")
    for flag, default, meaning in describe(kind.config_class):
        say(f"  {flag}{f' ({default})' if default else ''}: {meaning}")
