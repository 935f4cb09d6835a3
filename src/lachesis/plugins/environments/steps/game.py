"""Players' view of one episode of an environment: its observations, the model's actions, and the rewards."""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lachesis.common.errors import LachesisError
from lachesis.common.imports import describe_exception
from lachesis.common.types import Message
from lachesis.process.threads import DaemonThread
from lachesis.rollouts.episodes import RolloutFailed

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """A turn of the model: its text, and the same with all special tokens."""

    text: str
    raw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Response of an environment.

    Args:
        messages: new ones.
        answer: the turn before as a message, if a message holds more than its text.
        reward: of this step alone.
    """

    messages: tuple[Message, ...] = ()
    answer: Message | None = None
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class EnvironmentCalls:
    """Calls into one environment: coroutine functions run on the loop of the rollouts, all others on one thread.

    Each environment has one daemon thread from its creation to its end; a hanging one is abandoned.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._thread: DaemonThread | None = None

    async def __call__(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call ``function`` and return its result. Errors other than ours are raised as RolloutFailed."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*given, **named)
            return await asyncio.wrap_future(self._submit(partial(function, *given, **named)))
        except LachesisError:
            raise
        except Exception as error:
            name = getattr(function, "__name__", "it")
            message = f"{self._what}: {name} raised {describe_exception(error, None)}"
            raise RolloutFailed(message, cause=_cause(error)) from error

    async def close(self, function: Callable[..., Any] | None) -> None:
        """Call ``function`` last, if given, without waiting for a thread that may hang."""
        try:
            if function is not None and inspect.iscoroutinefunction(function):
                async with asyncio.timeout(_CLOSE_S):
                    await function()
            elif function is not None:
                self._submit(function).add_done_callback(self._closed)
        except Exception as error:
            self._warn(error)
        finally:
            if self._thread is not None:
                self._thread.abandon()
                self._thread = None

    def _submit(self, function: Callable[..., Any]) -> Future[Any]:
        if self._thread is None:
            self._thread = DaemonThread("lachesis-environment")
        return self._thread.submit(function, {})

    def _closed(self, future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        logger.warning("%s: closing it raised %s", self._what, describe_exception(error, None))


def _cause(error: Exception) -> str:
    """Return the name under which a failure of the environment is counted."""
    if isinstance(error, TimeoutError):
        return "timeout"
    return "connection" if isinstance(error, ConnectionError) else "environment"


class Game(ABC):
    """Play of one episode. ``subject`` is the user's environment object."""

    subject: Any = None

    @abstractmethod
    async def begin(self) -> Seen:
        """Return the model's first observation. Raises RolloutFailed if the environment does not begin."""

    @abstractmethod
    async def step(self, action: Action) -> Seen:
        """Return the result of a turn. Raises RolloutFailed if the environment fails."""

    async def worth(self) -> float:
        """Return the reward of the episode as a whole, beyond the rewards of its steps."""
        return 0.0

    async def close(self) -> None:
        """Release resources, also after a failure or cancellation."""
        return None


def shown(observation: object, *, what: str) -> tuple[Message, ...]:
    """Return an observation as messages: a text becomes a user message. Raises RolloutFailed for anything else."""
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    if isinstance(observation, list | tuple):
        found: list[Any] = list(observation)  # pyright: ignore[reportUnknownArgumentType]
        if found and all(isinstance(one, Mapping) and "role" in one for one in found):
            return tuple(found)
    raise RolloutFailed(
        f"{what}: an observation is a {type(observation).__name__}, neither a text nor messages; have the environment "
        "return a text",
        cause="environment",
    )


def number(value: object, *, what: str) -> float:
    """Return a reward as a number, if need be from numpy or torch. Raises RolloutFailed if it is not one."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise RolloutFailed(f"{what}: a reward is {value!r}, not a number", cause="environment") from error


def named_arguments(function: Callable[..., Any], row: Row) -> dict[str, Any]:
    """Return the columns of a task that a function names as arguments; all if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in row.items() if name in names}
