"""Calling a function that may hang, and reading what it returned.

Python cannot kill a thread. A call that passes its deadline is therefore left behind on its thread, which is
a daemon and so never keeps the interpreter alive, and the next call gets a new thread.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: a result, the exception it raised, or neither within the deadline."""

    result: Any = None
    error: BaseException | None = None
    hung: bool = False


@dataclass(frozen=True, slots=True)
class BadValue:
    """Something that is no reward, in words."""

    what: str


class CallThread:
    """Runs calls one at a time on one daemon thread, which is replaced only after a call that hung."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def close(self) -> None:
        """End the thread; a later call starts a new one. Idempotent."""
        with self._lock:
            if self._worker:
                self._worker.abandon()
            self._worker = None

    def call(self, function: Callable[..., Any], kwargs: Mapping[str, Any], *, timeout_s: float | None) -> Outcome:
        """Call ``function(**kwargs)``, and await what it returns if that is awaitable.

        What it raises, ``SystemExit`` included, comes back in the outcome.
        """
        with self._lock:
            worker, self._worker = self._worker or _Worker(self._name), None
            outcome = Outcome(hung=True)
            try:
                outcome = worker.run(function, kwargs, timeout_s)
            finally:  # an interrupt leaves the call running, as a hang does
                if outcome.hung:
                    worker.abandon()
                else:
                    self._worker = worker
            return outcome


_Call: TypeAlias = tuple[Future[Any], Callable[..., Any], Mapping[str, Any]]


class _Worker:
    """A daemon thread with an event loop of its own for coroutine functions."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._task: asyncio.Task[Any] | None = None
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, function: Callable[..., Any], kwargs: Mapping[str, Any], timeout_s: float | None) -> Outcome:
        future: Future[Any] = Future()
        self._calls.put((future, function, kwargs))
        try:
            error = future.exception(timeout_s)
        except TimeoutError:  # of the wait; the function's own comes back as a value
            return Outcome(hung=True)
        return Outcome(result=future.result()) if error is None else Outcome(error=error)

    def abandon(self) -> None:
        """Cancel a coroutine that hangs, and end the thread when its call returns, if it ever does."""
        if task := self._task:
            task.get_loop().call_soon_threadsafe(task.cancel)
        self._calls.put(None)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                future, function, kwargs = call
                try:
                    result = function(**kwargs)
                    if inspect.isawaitable(result):
                        result = runner.run(self._wait(result))
                    future.set_result(result)
                except BaseException as error:
                    future.set_exception(error)

    async def _wait(self, awaitable: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        return await awaitable


def read_rewards(result: object, count: int) -> list[float | BadValue | None] | BadValue:
    """The rewards of ``count`` completions as floats, ``None`` where the function abstained.

    Numbers may be Python's, numpy's or torch's; the list may be an array or a tensor of shape [count].
    A value that is no finite number comes back as :class:`BadValue` in its place; a result that is no list
    of this length as one :class:`BadValue`.
    """
    if callable(to_list := getattr(result, "tolist", None)):
        result = to_list()
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        return BadValue(f"returned {_phrase(result)}, not a list with a reward per completion")
    if len(result) != count:
        return BadValue(f"returned {len(result)} rewards for {count} completions")
    return [_read_value(value) for value in result]


def _read_value(value: object) -> float | BadValue | None:
    if value is None:
        return None
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # type: ignore[attr-defined]
    if not isinstance(number, float | int):
        return BadValue(f"returned {_phrase(value)} as a reward")
    try:
        number = float(number)
    except OverflowError:
        return BadValue("returned an integer too large for a reward")
    return number if math.isfinite(number) else BadValue(f"returned {number} as a reward")


def _phrase(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({shorten(value)})"


def shorten(value: object, limit: int = 60) -> str:
    """``repr`` for messages, cut after ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
