"""The agents of a run, from the section ``source`` of its configuration."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lachesis.common.errors import ConfigError
from lachesis.common.types import SamplingParams
from lachesis.config import schema
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.environments.agents.container import container_of
from lachesis.plugins.environments.agents.player import AgentPlayers
from lachesis.plugins.environments.agents.process import AgentCommand
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import Recorder
from lachesis.plugins.sandbox.cell import Cell, CellRunner
from lachesis.plugins.sandbox.records import Limits, Program, SandboxError
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets.formats import GOLD_COLUMNS
from lachesis.rollouts.generation import reward_decoder
from lachesis.rollouts.tools import load_parser
from lachesis.train.model.loading import context_length
from lachesis.train.policy import Policy

# Address of the model on agents' own networks.
_PORT = 8000
# Columns that usually hold answers or tests; functions that take any column may judge by them.
ANSWERS = frozenset((*GOLD_COLUMNS, "ground_truth", "gold", "test", "tests", "test_cases", "verification_info"))


def build_agents(
    config: LachesisConfig, *, policy: Policy, calls: CallBatcher, params: SamplingParams, judged_by: frozenset[str]
) -> AgentPlayers:
    """Build agents and their proxy, which begins to listen at the first rollout.

    Args:
        params: sampling parameters.
        judged_by: columns that rewards are computed from; agents see them only if the configuration names them.

    Raises:
        ConfigError: the command or its directory does not exist, or the model has no chat template.
    """
    source, tokenizer = config.source, policy.loaded.tokenizer
    assert isinstance(source, schema.AgentSourceConfig)
    if not tokenizer.chat_template and "chat_template" not in config.data.chat_template_kwargs:
        raise ConfigError(
            "agents send conversations, and the model has no chat template", remedy="set model.chat_template"
        )
    recorder = Recorder(
        tokenizer,
        parse=load_parser(source.tool_parser, tokenizer=tokenizer),
        template_kwargs=config.data.chat_template_kwargs,
        max_context=context_length(config.model),
    )
    agent = agent_of(source, judged_by=judged_by)
    if agent.cell is not None:
        check_wall(agent.cell)
    return AgentPlayers(
        agent=agent,
        proxy=AgentProxy(calls, recorder, host=source.host),
        params=params,
        decode=reward_decoder(tokenizer, config.rewards.special_tokens),
        max_concurrent=source.max_concurrent,
        score_nonzero=source.nonzero_exit == "score",
    )


def agent_of(source: schema.AgentSourceConfig, *, judged_by: frozenset[str]) -> AgentCommand:
    """Return the command of a configuration, with its sandbox. Raises ConfigError."""
    in_command = {argument[1:-1] for argument in source.command if argument[:1] + argument[-1:] == "{}"}
    walled = source.container is None and source.wall != "none"
    return AgentCommand(
        tuple(source.command),
        None if source.workdir is None else Path(source.workdir),
        source.env,
        source.timeout_s,
        container=None if source.container is None else container_of(source.container),
        cell=cell_of(source) if walled else None,
        inherited=source.inherit_env,
        told=frozenset(source.columns) | (in_command - judged_by - ANSWERS),
        keep_files=tuple(source.keep_files),
        self_reported=source.self_reported,
    )


def check_wall(cell: Cell) -> None:
    """Try the sandbox. Raises SandboxError if it cannot be set up."""
    program = Program(argv=("/bin/sh", "-c", "exit 0"), limits=Limits(wall_s=30))
    outcome = CellRunner(readable=cell.readable).run(program)
    if not outcome.succeeded:
        said = outcome.stderr.decode("utf-8", "replace").strip()[-300:]
        raise SandboxError(f"a program cannot run in the sandbox of agents ({said})")


def cell_of(source: schema.AgentSourceConfig) -> Cell:
    """Return the sandbox that a configuration puts around its agents."""
    return Cell(
        box="",
        port=_PORT if source.network == "proxy" else None,
        readable=(*_files_of(source.command), *(str(Path(path).absolute()) for path in source.readable)),
        memory_bytes=source.memory_mb << 20,
        disk_bytes=source.disk_mb << 20,
    )


def _files_of(command: Sequence[str]) -> list[str]:
    """Return the program and the files that a command line names, and the targets of links among them."""
    named = [path for path in (shutil.which(command[0]), *command[1:]) if path and os.path.isabs(path)]
    return [one for path in named if os.path.isfile(path) for one in (path, os.path.realpath(path))]
