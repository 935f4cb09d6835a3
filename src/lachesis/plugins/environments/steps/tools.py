"""Environments of TRL's ``environment_factory``: their public methods are tools, and their state is the reward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Message
from lachesis.plugins.environments.steps.game import Action, EnvironmentCalls, Game, Row, Seen, number, shown
from lachesis.rollouts.episodes import RolloutFailed
from lachesis.rollouts.tools.parsers import ToolParser
from lachesis.rollouts.tools.template import answer_message
from lachesis.rollouts.tools.toolbox import Tool, Toolbox, described

# The limit of the whole rollout ends a call that hangs; if there is none, an hour does.
_LONGEST_CALL_S = 3600.0
_OWN = ("reset", "get_reward")


def tool_names(env: object) -> list[str]:
    """Return the methods that the model may call: all public ones of its class except ``reset`` and ``get_reward``."""
    methods = inspect.getmembers(type(env), predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in _OWN]


def tool_schemas(env: object) -> dict[str, Mapping[str, Any]]:
    """Return the tools' descriptions. Raises ConfigError if there are none, or one has no docstring or types."""
    names = tool_names(env)
    if not names:
        raise ConfigError(
            f"{type(env).__name__} has no public methods besides reset and get_reward: the model could do nothing",
            remedy="write a method with a docstring and types for each thing that the model may do",
        )
    return {name: described(f"{type(env).__name__}.{name}", getattr(env, name)).schema for name in names}


class ToolGame(Game):
    """Game that ends with the first turn that calls no tool.

    ``reset`` gets all columns of the task. Its result is added to the last message of the task's ``prompt``.
    """

    def __init__(
        self,
        env: Any,
        row: Row,
        calls: EnvironmentCalls,
        *,
        schemas: Mapping[str, Mapping[str, Any]],
        parse: ToolParser,
        what: str,
    ) -> None:
        self.subject = env
        self._row = row
        self._calls = calls
        self._parse = parse
        self._what = what
        self._called = 0
        self._schemas = list(schemas.values())
        tools = [Tool(name, getattr(env, name), schema) for name, schema in schemas.items()]
        self._toolbox = Toolbox(tools, timeout_s=_LONGEST_CALL_S)

    async def begin(self) -> Seen:
        said = await self._calls(self.subject.reset, **self._row)
        if not isinstance(said, str | None):
            kind = type(said).__name__
            raise RolloutFailed(f"{self._what}: reset returned a {kind}, not a text", cause="environment")
        messages = shown(self._row.get("prompt") or "", what=self._what)
        last = messages[-1]
        return Seen(messages=(*messages[:-1], {**last, "content": f"{last['content']}{said or ''}"}))

    async def step(self, action: Action) -> Seen:
        turn = self._parse(action.raw, self._schemas)
        answer = answer_message(turn.content, [(one.name, one.arguments) for one in turn.calls], first=self._called)
        if not turn.calls:
            return Seen(answer=answer, done=True, metrics={"tool_calls": 0.0, "tool_errors": 0.0})
        told: list[Message] = []
        failed = 0
        for call, written in zip(turn.calls, answer["tool_calls"], strict=True):  # one by one: they share a state
            (observed,) = await self._calls(self._toolbox.call_all, [call])
            told.append(observed.message(tool_call_id=written["id"]))
            failed += observed.failed
        self._called += len(turn.calls)
        metrics = {"tool_calls": float(len(told)), "tool_errors": float(failed)}
        return Seen(messages=tuple(told), answer=answer, metrics=metrics)

    async def worth(self) -> float:
        if not owns_reward(self.subject):
            return 0.0
        return number(await self._calls(self.subject.get_reward), what=self._what)

    async def close(self) -> None:
        await self._toolbox.stop()
        await self._calls.close(None)  # a method called close would be a tool


def owns_reward(env: object) -> bool:
    """Return True if the environment itself gives an episode's reward."""
    return callable(getattr(env, "get_reward", None))
