"""Assembly and run of one environment: its inference client, its tokenizer, its outputs, and the signals."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lachesis.common.errors import ConfigError, did_you_mean
from lachesis.common.imports import load_function
from lachesis.common.types import EvalResult
from lachesis.plugins.atropos.environments.base import Environment, Evaluable
from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.outputs import Outputs
from lachesis.plugins.atropos.environments.process import Processed, process
from lachesis.plugins.atropos.environments.rollout_api import RolloutApi
from lachesis.plugins.atropos.environments.runner import Runner, Summary
from lachesis.plugins.atropos.environments.settings import EnvironmentOptions
from lachesis.plugins.atropos.environments.shipped import SHIPPED
from lachesis.plugins.atropos.environments.tokenizer import load_tokenizer
from lachesis.process.signals import keep_handlers_from_children
from lachesis.process.tasks import unless

logger = logging.getLogger("lachesis.plugins.atropos.environments")

T = TypeVar("T")
E = TypeVar("E", bound=Evaluable[Any, Any])
Command = Callable[[E, asyncio.Event], Coroutine[Any, Any, T]]

_GROUPS = 8


def run(kind: type[E], options: EnvironmentOptions, command: Command[E, T]) -> tuple[T | None, int]:
    """Build an environment and run ``command`` on it: :func:`serve`, :func:`make_groups` or :func:`evaluate`.

    Returns:
        the command's result, None if a signal came first; and the exit code: 0, or 128 and the number of the signal.

    Raises:
        LachesisError: the environment failed.
    """
    return asyncio.run(_run(kind, options, command))


def find(name: str) -> type[Environment[Any, Any]]:
    """Find the class of an environment.

    Raises:
        ConfigError: the name is unknown, or its object is not an environment.
    """
    if (known := SHIPPED.get(name)) is not None:
        return known
    if ":" not in name and "." not in name:
        listed = f"known are {', '.join(SHIPPED)}, or give FILE.py:CLASS"
        remedy = did_you_mean(name, SHIPPED, otherwise=listed)
        raise ConfigError(f"unknown environment {name!r}", remedy=remedy)
    found: Any = load_function(name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(
            f"{name} is not an environment",
            remedy="name a subclass of lachesis.plugins.atropos.environments.base.Environment",
        )
    return found


async def serve(environment: Environment[Any, Any], stop: asyncio.Event) -> Summary:
    """Push groups to the rollout API until the trainer has all its batches, then send the finished ones."""
    config = environment.config
    if config.max_num is not None:
        logger.info("using the first %d problems only (--env.max_num)", config.max_num)
    api = RolloutApi(config.rollout_server_url, wait_s=config.wait_timeout)
    outputs = _outputs(environment)
    try:
        return await Runner(environment, api=api, outputs=outputs).serve(stop=stop)
    finally:
        outputs.close()
        await api.close()


async def make_groups(environment: Environment[Any, Any], stop: asyncio.Event) -> Processed | None:
    """Write a few groups to a file, and a page to read them."""
    config = environment.config
    environment.config = config = config.model_copy(update={"include_messages": True})
    groups = config.total_steps if config.total_steps > 0 else _GROUPS
    path = config.data_path_to_save_groups or Path("data") / f"{environment.name}.jsonl"
    return await unless(stop.wait(), process(environment, groups=groups, path=path))


async def evaluate(environment: Environment[Any, Any], stop: asyncio.Event) -> EvalResult | None:
    """Score greedy answers to the held-out problems."""
    return await unless(stop.wait(), _evaluate(environment))


async def _evaluate(environment: Environment[Any, Any]) -> EvalResult:
    outputs = _outputs(environment)
    try:
        await environment.setup()
        await environment.client.wait_until_ready()
        result = replace(await environment.evaluate(), step=0)
        outputs.evaluation(environment.config.wandb_name or environment.name, result)
        return result
    finally:
        outputs.close()


async def _run(kind: type[E], options: EnvironmentOptions, command: Command[E, T]) -> tuple[T | None, int]:
    stop = asyncio.Event()
    client = InferenceClient(options.openai, slurm=options.slurm)
    environment, result = None, None
    with _signals(stop) as received:
        try:
            environment = await unless(stop.wait(), _build(kind, options, client))
            if environment is not None:
                result = await command(environment, stop)
        finally:
            if environment is not None:
                await environment.close()
            await client.close()
    return result, 128 + received[0] if received else 0


async def _build(kind: type[E], options: EnvironmentOptions, client: InferenceClient) -> E:
    name = options.env.tokenizer_name or options.openai.model_name
    if name is None:
        await client.wait_until_ready()
        name = await client.model_path()
    return kind(options.env, client=client, tokenizer=load_tokenizer(name))


def _outputs(environment: Environment[Any, Any]) -> Outputs:
    config = environment.config
    return Outputs(
        log_dir=config.log_dir,
        groups_path=config.data_path_to_save_groups,
        evals_dir=config.data_dir_to_save_evals,
    )


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """Have SIGINT and SIGTERM set ``stop``; yield the list of received signals."""
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def request(number: int) -> None:
        received.append(number)
        stop.set()

    keep_handlers_from_children()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, request, number)
    try:
        yield received
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
