"""Construction of the players of a stepped environment from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError, DataError
from lachesis.common.imports import describe_exception, load_function
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.environments.section import StepsSourceConfig
from lachesis.plugins.environments.steps.game import EnvironmentCalls, Game, Row
from lachesis.plugins.environments.steps.gymnasium import GymnasiumGame
from lachesis.plugins.environments.steps.observations import Rendering
from lachesis.plugins.environments.steps.openenv import OpenEnvGame, find_server, is_address
from lachesis.plugins.environments.steps.players import EpisodeLimits, MakeGame, StepPlayers
from lachesis.plugins.environments.steps.tools import ToolGame, owns_reward, tool_names, tool_schemas
from lachesis.process.threads import CallThread
from lachesis.rollouts.datasets.rows import read_file
from lachesis.rollouts.episodes import PolicyAccess
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.rollouts.tools.parsers import load_parser

HERMES = "hermes"
# Limit, in seconds, for making the environment before the run; later ones have the limit of their rollout.
_MAKING_S = 600.0


def build_players(config: LachesisConfig, access: PolicyAccess, rewarder: Rewarder | None) -> StepPlayers:
    """Build the players of the section ``source`` with kind steps. Raises as :func:`step_players`."""
    source = config.source
    assert isinstance(source, StepsSourceConfig)
    return step_players(access, source, rewarder=rewarder, template_kwargs=config.data.chat_template_kwargs)


def step_players(
    policy: PolicyAccess,
    source: StepsSourceConfig,
    *,
    rewarder: Rewarder | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> StepPlayers:
    """Build the players of an environment, after making one to see which methods it has.

    Args:
        policy: access to the model that plays.
        source: the environment, and the settings for playing it.
        rewarder: reward functions besides the environment's own reward.
        template_kwargs: further variables of the chat template.

    Raises:
        ConfigError: it cannot be loaded or made, has none of the interfaces, or would have no reward.
        DataError: there are no tasks, or unlimited ones.
    """
    rows, schemas, owned = task_rows(source), dict[str, Mapping[str, Any]](), True
    if source.interface == "openenv" or is_address(source.environment):
        make = _over_server(source)
    else:
        maker = _maker(source, policy)
        probe, interface = _tried(maker, rows[0], source)
        _require_no_parser(source, interface)
        if interface == "trl":
            schemas, owned = tool_schemas(probe), owns_reward(probe)
        make = _games(source, maker, interface, schemas, policy)
    if not owned and rewarder is None:
        raise ConfigError(
            f"{source.environment!r} has no get_reward, and rewards.functions is empty: no reward is defined",
            remedy="write get_reward(self) -> float, or a reward function that takes `environments`",
        )
    if source.turns_apart and not source.turn_advantage:
        raise ConfigError(
            "source.turns_apart takes turns' rewards out of the episode's, but source.turn_advantage is 0",
            remedy="set source.turn_advantage (MT-GRPO has 1), or leave turns_apart out",
        )
    told = {"tools": list(schemas.values())} if schemas else {}
    return StepPlayers(
        policy=policy,
        rows=rows,
        make=make,
        rendering=Rendering(
            policy.tokenizer, {**(template_kwargs or {}), **told}, special_tokens=policy.special_tokens
        ),
        limits=EpisodeLimits(source.max_turns, source.turn_tokens),
        eval_tasks=source.eval_tasks,
        rewarder=rewarder,
        owned=owned,
        turn_advantage=source.turn_advantage,
        turns_apart=source.turns_apart,
    )


def _over_server(source: StepsSourceConfig) -> MakeGame:
    """Return the maker of episodes on a server of OpenEnv. Raises as :func:`find_server`."""
    if not is_address(source.environment) or source.interface not in ("auto", "openenv"):
        raise ConfigError(
            f"source.environment is {source.environment!r} and source.interface {source.interface}",
            remedy="give the address of an OpenEnv server, such as http://127.0.0.1:8000, and leave the interface out",
        )
    _require_no_parser(source, "openenv")
    server = find_server(source.environment, source.args)

    async def make(row: Row) -> Game:
        return OpenEnvGame(server, row)

    return make


def _require_no_parser(source: StepsSourceConfig, interface: str) -> None:
    if interface != "trl" and source.tool_parser != HERMES:
        raise ConfigError("source.tool_parser is only for TRL's interface, with tools", remedy="leave it out")


def task_rows(source: StepsSourceConfig) -> list[Row]:
    """Return the tasks: rows of a file, or numbers; each has a ``seed``, its number unless the row has one."""
    if source.tasks is None:
        if source.max_tasks is None:
            raise DataError(
                f"{source.environment!r} has unlimited tasks",
                remedy="set source.max_tasks, or source.tasks to a file",
            )
        return [{"seed": number} for number in range(source.max_tasks)]
    found = read_file(Path(source.tasks))[: source.max_tasks]
    if not found:
        raise DataError(f"{source.tasks} has no tasks", remedy="write a row for each task")
    rows = [dict(row.columns) for row in found]
    return [row if row.get("seed") is not None else row | {"seed": number} for number, row in enumerate(rows)]


def interface_of(env: object) -> str:
    """Return the interface of an environment by its methods. Raises ConfigError if it fits none."""
    has = {name for name in ("reset", "step") if callable(getattr(env, name, None))}
    if {"reset", "step"} <= has:
        return "gymnasium"
    if "reset" in has and tool_names(env):
        return "trl"
    raise ConfigError(
        f"a {type(env).__name__} cannot be stepped: it has neither reset and step, nor reset "
        "and methods that are tools",
        remedy="add these methods, or name another class in source.environment",
    )


def _maker(source: StepsSourceConfig, policy: PolicyAccess) -> Callable[[Row], Any]:
    """Return a function that makes a new environment for a task, from the named class or function."""
    factory = load_function(source.environment)
    try:
        names = {name for name, one in inspect.signature(factory).parameters.items() if one.kind is not one.VAR_KEYWORD}
    except (TypeError, ValueError):  # a class in C: it gets the configuration's arguments
        names = set[str]()

    def make(row: Row) -> Any:
        offered = {"tokenizer": policy.tokenizer, **row}
        return factory(**{name: value for name, value in offered.items() if name in names} | dict(source.args))

    return make


def _tried(maker: Callable[[Row], Any], row: Row, source: StepsSourceConfig) -> tuple[Any, str]:
    """Make an environment, close it again, and return it with its interface. Raises ConfigError if that fails."""
    thread = CallThread("lachesis-environment")
    try:
        made = thread.call(maker, {"row": row}, timeout_s=_MAKING_S)
        if made.hung or made.error is not None:
            why = f"took longer than {_MAKING_S:g} s" if made.error is None else describe_exception(made.error, None)
            raise ConfigError(
                f"source.environment {source.environment!r} cannot be made: {why}",
                remedy="fix it, or correct source.args",
            ) from made.error
        interface = source.interface if source.interface != "auto" else interface_of(made.result)
        if interface != "trl" and callable(close := getattr(made.result, "close", None)):
            thread.call(close, {}, timeout_s=_MAKING_S)
        return made.result, interface
    finally:
        thread.close()


def _games(
    source: StepsSourceConfig,
    maker: Callable[[Row], Any],
    interface: str,
    schemas: Mapping[str, Mapping[str, Any]],
    policy: PolicyAccess,
) -> MakeGame:
    parse = load_parser(source.tool_parser, tokenizer=policy.tokenizer)
    what = source.environment

    async def make(row: Row) -> Game:
        calls = EnvironmentCalls(what)
        try:
            env = await calls(maker, row)
        except BaseException:
            await calls.close(None)
            raise
        if interface == "gymnasium":
            return GymnasiumGame(env, row, calls, what=what)
        return ToolGame(env, row, calls, schemas=schemas, parse=parse, what=what)

    return make
