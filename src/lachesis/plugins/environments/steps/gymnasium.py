"""Environments with Gymnasium's methods over text: ``reset() -> (observation, info)`` and ``step(text)``."""

from __future__ import annotations

from typing import Any

from lachesis.plugins.environments.steps.game import (
    Action,
    EnvironmentCalls,
    Game,
    Row,
    Seen,
    named_arguments,
    number,
    shown,
)
from lachesis.rollouts.episodes import RolloutFailed


class GymnasiumGame(Game):
    """Game whose ``step`` returns observation, reward, terminated, truncated and info, or the older interface's four.

    ``reset`` gets the columns of the task that it names; Gymnasium's ``reset`` names ``seed``, and ``options``, which
    has all other columns.
    """

    def __init__(self, env: Any, row: Row, calls: EnvironmentCalls, *, what: str) -> None:
        self.subject = env
        self._calls = calls
        self._row = row
        self._what = what

    async def begin(self) -> Seen:
        options = {name: value for name, value in self._row.items() if name != "seed"}
        given = named_arguments(self.subject.reset, {"options": options, **self._row})
        found = await self._calls(self.subject.reset, **given)
        observation = found[0] if isinstance(found, tuple) and len(found) == 2 else found  # pyright: ignore[reportUnknownArgumentType]
        return Seen(messages=shown(observation, what=self._what))

    async def step(self, action: Action) -> Seen:
        found = await self._calls(self.subject.step, action.text)
        if not isinstance(found, tuple) or len(found) not in (4, 5):  # pyright: ignore[reportUnknownArgumentType]
            raise RolloutFailed(
                f"{self._what}: step did not return (observation, reward, terminated, truncated, info)",
                cause="environment",
            )
        observation, reward, *ended, _info = found  # pyright: ignore[reportUnknownVariableType]
        done = any(map(bool, ended))  # pyright: ignore[reportUnknownArgumentType]
        messages = () if done else shown(observation, what=self._what)
        return Seen(messages=messages, reward=number(reward, what=self._what), done=done)

    async def close(self) -> None:
        await self._calls.close(getattr(self.subject, "close", None))
