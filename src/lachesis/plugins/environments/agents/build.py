"""The agents of a run, from the section ``source`` of its configuration."""

from __future__ import annotations

from pathlib import Path

from lachesis.common.errors import ConfigError
from lachesis.config import schema
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.plugins.environments.agents.container import container_of
from lachesis.plugins.environments.agents.player import AgentRollouts
from lachesis.plugins.environments.agents.process import AgentCommand
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import Recorder
from lachesis.rollouts.call_batcher import GatheredCalls
from lachesis.rollouts.datasets.formats import GOLD_COLUMNS
from lachesis.rollouts.generation import reward_decoder
from lachesis.rollouts.tools import load_parser
from lachesis.train.model.loading import context_length
from lachesis.train.policy import Policy

# Columns that hold answers or tests as a rule, which functions that take any column may judge by.
ANSWERS = frozenset((*GOLD_COLUMNS, "ground_truth", "gold", "test", "tests", "test_cases", "verification_info"))


def build_agents(config: LachesisConfig, *, policy: Policy, engine: Engine, judged_by: frozenset[str]) -> AgentRollouts:
    """Agents and their proxy, which begins to listen with the first rollout.

    Args:
        judged_by: columns by which rewards are judged; agents are not told them unless the configuration names them.

    Raises:
        ConfigError: the command or its directory is not there, or the model has no chat template.
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
    # What shares the trainer's process does one call after the other.
    at_once = 1 if config.engine.place == "trainer" else source.max_concurrent
    workdir = None if source.workdir is None else Path(source.workdir)
    container = None if source.container is None else container_of(source.container)
    return AgentRollouts(
        agent=AgentCommand(
            tuple(source.command),
            workdir,
            source.env,
            source.timeout_s,
            container,
            inherited=source.inherit_env,
            hidden=(judged_by | ANSWERS) - {"prompt", *source.columns},
        ),
        proxy=AgentProxy(lambda: GatheredCalls(engine, at_once=at_once), recorder, host=source.host),
        decode=reward_decoder(tokenizer, config.rewards.special_tokens),
        max_concurrent=source.max_concurrent,
        retries=source.retries,
        score_nonzero=source.nonzero_exit == "score",
    )
