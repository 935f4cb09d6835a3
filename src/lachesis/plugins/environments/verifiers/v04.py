"""Environments of verifiers 0.4 and later: a task set, the agents that work on a task, and the traces they leave."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import renderers.client
import verifiers.v1 as vf
from renderers.base import MODEL_RENDERER_MAP
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import default_harness_id, harness_class, load_environment, resolve_env_config

from lachesis.common.errors import ConfigError, DataError
from lachesis.common.types import Prompt
from lachesis.plugins.environments.turn_server import MODEL, joined
from lachesis.plugins.environments.verifiers import harness
from lachesis.plugins.environments.verifiers.settings import (
    VerifiersPlayers,
    VerifiersSettings,
    environment_id,
    kept_turns,
)
from lachesis.rollouts.episodes import Played, RolloutFailed, cause_of, held_out_last

logger = logging.getLogger(__name__)

_TEMPLATE = "lachesis.plugins.environments.verifiers.renderer.TemplateRenderer"
_SHELL = "bash"
_NO_KEY = "LACHESIS_NO_KEY"  # the name of a variable that is never set: the port is private to this process


class V04Players(VerifiersPlayers):
    """Players of the episodes of one environment.

    Raises:
        ConfigError: there is no such environment, or its arguments do not fit.
        DataError: it has no tasks, or unlimited ones and ``max_tasks`` is not set.
    """

    def __init__(self, settings: VerifiersSettings) -> None:
        super().__init__(settings)
        self._stack = AsyncExitStack()
        self._env = _load(settings)
        self._tasks = _tasks(self._env, settings)
        self._client: TrainClientConfig | None = None

    def split(self) -> tuple[list[Prompt], list[Prompt]]:
        """Return the tasks to train on, and the last ones, which are held out."""
        prompts = [_prompt(number, task) for number, task in enumerate(self._tasks)]
        return held_out_last(prompts, self.settings.eval_tasks)

    async def start(self) -> None:
        """Start the server in front of the engine, and the parts that the environment's agents share."""
        await super().start()
        # A lock of the library belongs to the event loop that first waited for it, which may be an earlier run's.
        renderers.client._max_prompt_len_lock = asyncio.Lock()
        fields = {
            "base_url": f"{self.settings.server.url}/v1",
            "api_key_var": _NO_KEY,
            "renderer": _renderer(self.settings),
            "renderer_model_name": str(self.settings.tokenizer),
        }
        self._client = TrainClientConfig.model_validate(fields)
        await self._stack.enter_async_context(self._env.serving())

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        """Play one episode. Each trainable trace becomes a sample with the trace's reward."""
        server, minted = self.settings.server, list[str]()
        assert self._client is not None, "call start first"
        params = self.settings.params
        sampling = vf.Sampling(temperature=0.0 if greedy else params.temperature, max_tokens=params.max_tokens)
        context = ModelContext(MODEL, self._client, sampling.model_copy(update={"seed": seed}))
        (slot,) = self._env.slots(self._tasks[int(prompt.id)], 1)
        try:
            episode = await self._env.run_slot(slot, context, on_trace=lambda trace: minted.append(trace.id))
            server.check()
            _require_whole(episode, where=f"task {prompt.id}")
            turns = {trace.id: server.take(trace.id) for trace in episode.traces}
        finally:
            for name in minted:
                server.take(name)
        temperature = params.temperature if params.temperature > 0 else 1.0
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        samples = [
            replace(sample, reward=float(trace.reward), rewards=(float(trace.reward),))
            for trace in traces
            for sample in joined(
                kept_turns(turns[trace.id], _sampled(trace), where=f"task {prompt.id}"),
                decode=self.settings.decode,
                temperature=temperature,
            )
        ]
        if not samples:
            raise RolloutFailed(f"task {prompt.id}: no trained agent said anything", cause="empty")
        return Played(tuple(samples), metrics=_metrics(traces))

    async def stop(self) -> None:
        await self._stack.aclose()
        await super().stop()


def _load(settings: VerifiersSettings) -> vf.Env:
    name = environment_id(settings.environment)
    args = dict(settings.args)
    data = args | {"taskset": {"id": name} | dict(args.get("taskset") or {})}
    sys.modules.setdefault(harness.ID, harness)
    try:
        config = _without_shell(resolve_env_config(data), args)
        env = load_environment(config)
    except Exception as error:  # the environment's own modules may raise anything
        raise ConfigError(
            f"source.environment {settings.environment!r} cannot be loaded: {type(error).__name__}: {error}",
            remedy="install its package, or correct source.args",
        ) from error
    _require_runtimes(config, settings)
    return env


def _without_shell(config: Any, args: Mapping[str, Any]) -> Any:
    """Return the configuration with our chat in place of verifiers' default harness, a shell.

    Agents run in this process if verifiers would rent a machine. A harness or a runtime that the user names, and a
    harness that the environment's package brings, stay.
    """
    changes: dict[str, Any] = {}
    for name, agent in agent_config_fields(config).items():
        update: dict[str, Any] = {}
        if agent.harness is None and default_harness_id(config.taskset.id) == _SHELL:
            update["harness"] = harness.ChatHarnessConfig.model_validate({"id": harness.ID})
        if agent.runtime == AgentConfig().runtime and "runtime" not in (args.get(name) or {}):
            update["runtime"] = SubprocessConfig()
        changes[name] = agent.model_copy(update=update)
    return config.model_copy(update=changes)


def _require_runtimes(config: Any, settings: VerifiersSettings) -> None:
    """Raise ConfigError for agents that processes of this machine cannot play, or not several at a time."""
    # Compared by name, because importing it takes a second.
    of_harbor = any(base.__name__ == "HarborConfig" for base in type(config.taskset).__mro__)
    for name, agent in agent_config_fields(config).items():
        if not isinstance(agent.runtime, SubprocessConfig):
            continue
        kind = agent.harness.id if agent.harness else default_harness_id(config.taskset.id)
        place = f"source.args.{name}.runtime"
        if harness_class(kind).NEEDS_CONTAINER:
            raise ConfigError(
                f"source.args: the harness {kind!r} of {name!r} runs only in a container, but {place} is a process",
                remedy=f"set {place}: {{type: docker}}, or use the harness bash, or the program with source.kind agent",
            )
        # Harbor's tests and their verdict are in /tests and /logs of this machine.
        if of_harbor and settings.max_concurrent > 1:
            raise ConfigError(
                "rollouts of Harbor's tasks would mix up their tests and rewards in /tests and /logs of this "
                f"machine: {place} is a process, and source.max_concurrent {settings.max_concurrent}",
                remedy=f"set source.max_concurrent: 1, or {place}: {{type: docker}}",
            )


def _tasks(env: vf.Env, settings: VerifiersSettings) -> list[Any]:
    taskset = env.taskset
    if settings.max_tasks is not None:
        taskset = taskset.take(settings.max_tasks)
    if not taskset.bounded:
        raise DataError(
            f"{settings.environment!r} has unlimited tasks", remedy="set source.max_tasks to a number of tasks"
        )
    tasks = list(taskset)
    if not tasks:
        raise DataError(f"{settings.environment!r} has no tasks", remedy="check source.args")
    return tasks


def _prompt(number: int, task: Any) -> Prompt:
    row = task.data.model_dump(mode="json", exclude_none=True)
    return Prompt(id=str(number), token_ids=(), text=task.data.prompt_text, columns=row)


def _renderer(settings: VerifiersSettings) -> dict[str, Any]:
    """Return the renderer's configuration: the library's for the model, or the chat template's, unless one is named."""
    fields = dict(settings.renderer)
    if fields.get("name", "auto") != "auto":
        return fields
    known = MODEL_RENDERER_MAP.get(settings.model)
    return fields | ({"name": "custom", "import_path": _TEMPLATE} if known is None else {"name": known})


def _require_whole(episode: Any, *, where: str) -> None:
    """Raise RolloutFailed for an unfinished episode."""
    timeouts = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
    if timeouts:
        raise RolloutFailed(f"{where}: the environment's time limit passed", cause="timeout")
    if episode.ok:
        return
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        raise RolloutFailed(f"{where}: the episode is incomplete", cause="unknown")
    first = errors[-1]
    raise RolloutFailed(f"{where}: {first.type}: {first.message}", cause=cause_of(first.type))


def _sampled(trace: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each completion that a trace marks as sampled."""
    return [
        tuple(token for token, sampled in zip(node.token_ids, node.mask, strict=True) if sampled)
        for node in trace.nodes
        if node.sampled
    ]


def _metrics(traces: Sequence[Any]) -> dict[str, float]:
    """Return the parts of the reward and the metrics of an episode, as means over its traces."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        for name, value in (parts | trace.metrics).items():
            if value is not None:
                found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
