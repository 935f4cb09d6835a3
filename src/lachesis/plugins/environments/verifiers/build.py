"""Players of an environment, for the installed version of verifiers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from lachesis.common.errors import DependencyError, first_line
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.environments.section import VerifiersSourceConfig
from lachesis.plugins.environments.turn_server import TurnServer
from lachesis.plugins.environments.verifiers.settings import (
    NEEDS,
    VerifiersPlayers,
    VerifiersSettings,
    installed_line,
    own_signals,
)
from lachesis.rollouts.episodes import PolicyAccess, TaskPlayers
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.rewards.rewarder import Rewarder


def build_players(config: LachesisConfig, access: PolicyAccess, rewarder: Rewarder | None) -> TaskPlayers:
    """Build the players of the section ``source`` with kind verifiers, whose rubrics score them.

    Raises as :func:`verifiers_players`.
    """
    source = config.source
    assert isinstance(source, VerifiersSourceConfig)
    return verifiers_players(access, source)


def verifiers_players(policy: PolicyAccess, source: VerifiersSourceConfig) -> TaskPlayers:
    """Build the players of an environment of verifiers.

    Raises:
        DependencyError: verifiers is not installed.
        ConfigError, DataError: the environment cannot be loaded, or has no tasks.
    """
    directory = tempfile.TemporaryDirectory(prefix="lachesis-tokenizer-")
    policy.tokenizer.save_pretrained(directory.name)
    settings = VerifiersSettings(
        environment=source.environment,
        args=source.args,
        server=TurnServer(
            policy.calls, params=policy.params, max_context=policy.max_context, vocab_size=policy.vocab_size
        ),
        tokenizer=Path(directory.name),
        model=policy.model,
        renderer=source.renderer,
        params=policy.params,
        decode=text_decoder(policy.tokenizer),
        max_tasks=source.max_tasks,
        eval_tasks=source.eval_tasks,
        max_concurrent=source.max_concurrent,
    )
    with own_signals():
        players = load_players()(settings)
    players.keep = directory
    return players


def load_players() -> Callable[[VerifiersSettings], VerifiersPlayers]:
    """Return the players for the installed line of verifiers. Raises DependencyError if it is missing or incomplete."""
    line = installed_line()
    try:
        if line == "0.1":
            from lachesis.plugins.environments.verifiers.v01 import EnvironmentPlayers

            return EnvironmentPlayers
        from lachesis.plugins.environments.verifiers.v04 import V04Players

        return V04Players
    except ImportError as error:
        raise DependencyError(f"verifiers cannot be imported: {first_line(error)}", remedy=NEEDS) from error
