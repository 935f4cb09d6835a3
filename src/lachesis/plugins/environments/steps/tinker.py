"""Environments with tinker-cookbook's methods: ``initial_observation()`` and ``step(action) -> StepResult``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from lachesis.common.types import Message
from lachesis.plugins.environments.steps.game import Action, EnvironmentCalls, Game, Seen, number, shown
from lachesis.rollouts.episodes import RolloutFailed


class TinkerGame(Game):
    """Observations are token ids (lists, or objects with ``to_ints``), and actions too; or both are messages.

    Where a next prompt begins with all tokens before it, as renderers that extend make it, the episode is one sequence.
    """

    def __init__(self, env: Any, calls: EnvironmentCalls, *, what: str) -> None:
        self.subject = env
        self._calls = calls
        self._what = what
        self._messages: list[Message] | None = None
        self._takes_extra = "extra" in inspect.signature(env.step).parameters

    async def begin(self) -> Seen:
        found = await self._calls(self.subject.initial_observation)
        observation, stop = found if isinstance(found, tuple) and len(found) == 2 else (found, None)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return self._seen(observation, stop)

    async def step(self, action: Action) -> Seen:
        answer: Message = {"role": "assistant", "content": action.text}
        extra = {"extra": {"stop_reason": action.finish_reason}} if self._takes_extra else {}
        if self._messages is not None:
            self._messages.append(answer)
        given = list(action.token_ids) if self._messages is None else dict(answer)
        result = await self._calls(self.subject.step, given, **extra)
        try:
            reward, done, metrics = result.reward, bool(result.episode_done), getattr(result, "metrics", None) or {}
            observation = result.next_observation if self._messages is None else result.next_messages
        except AttributeError as error:
            raise RolloutFailed(f"{self._what}: step returned no StepResult ({error})", cause="environment") from error
        seen = Seen() if done else self._seen(observation, getattr(result, "next_stop_condition", None))
        return Seen(
            messages=seen.messages, whole=seen.whole, token_ids=seen.token_ids, stop=seen.stop,
            stop_token_ids=seen.stop_token_ids, reward=number(reward, what=self._what), done=done,
            metrics={name: number(value, what=self._what) for name, value in metrics.items()},
        )  # fmt: skip

    async def close(self) -> None:
        await self._calls.close(getattr(self.subject, "close", None))

    def _seen(self, observation: Any, stop: Sequence[Any] | None) -> Seen:
        ends: list[Any] = [stop] if isinstance(stop, str) else list(stop or ())
        texts = tuple(one for one in ends if isinstance(one, str))
        tokens = tuple(int(one) for one in ends if not isinstance(one, str))
        if (ids := _token_ids(observation)) is not None and self._messages is None:
            return Seen(token_ids=ids, stop=texts, stop_token_ids=tokens)
        messages = list(shown(observation, what=self._what))
        known, self._messages = self._messages, messages
        if known and [_plain(one) for one in messages[: len(known)]] == [_plain(one) for one in known]:
            return Seen(messages=tuple(messages[len(known) :]), stop=texts, stop_token_ids=tokens)
        return Seen(messages=tuple(messages), whole=True, stop=texts, stop_token_ids=tokens)


def _token_ids(observation: Any) -> tuple[int, ...] | None:
    """Return the tokens of an observation; ``None`` if it does not consist of tokens."""
    found = observation.to_ints() if callable(getattr(observation, "to_ints", None)) else observation
    if isinstance(found, list | tuple) and found and all(isinstance(one, int) for one in found):  # pyright: ignore[reportUnknownVariableType]
        return tuple(found)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return None


def _plain(message: Message) -> tuple[Any, Any]:
    return message.get("role"), message.get("content")
