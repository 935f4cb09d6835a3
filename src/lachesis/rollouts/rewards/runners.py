"""How a reward function is run: in this process on a thread, or in processes of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from lachesis.common.imports import describe_exception
from lachesis.rollouts.rewards.calls import BadValue, CallThread, read_rewards
from lachesis.rollouts.rewards.state import CallLog, Logged

Values: TypeAlias = Sequence[float | BadValue | None]

HANG_REMEDY = "make it faster or give what it waits for a timeout, or raise rewards.timeout_s"
VALUE_REMEDY = "return a list with a finite number per completion, or None where the function abstains"
RAISE_REMEDY = "mend it, or let it return None for completions that it cannot judge"
SIGNAL_REMEDY = (
    "in this process reward functions run on a thread, where signal.alarm does not work: set rewards.num_workers "
    "to 1 or more, or turn such timeouts off (math_verify: parsing_timeout=None and timeout_seconds=None)"
)


@dataclass(frozen=True, slots=True)
class Signature:
    """Keywords that a function takes (``None``: any), and those that it cannot be called without."""

    accepted: frozenset[str] | None
    required: tuple[str, ...]

    def takes(self, name: str) -> bool:
        """Whether it may be called with this keyword."""
        return self.accepted is None or name in self.accepted


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call gave no list of rewards; ``what`` continues "reward function 'accuracy' ...".

    ``costly``: it took its time or its process, so it should not be repeated without need. ``traceable``: the
    call of each sample alone can tell which one it was.
    """

    what: str
    remedy: str
    costly: bool = False
    traceable: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call on ``count`` completions, and what it may log (names of ``CallLog.NAMES``)."""

    arguments: Mapping[str, Any]
    count: int
    logs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call: a value per completion, or a failure."""

    values: Values = ()
    failure: Failure | None = None
    logged: Logged = field(default_factory=Logged)


class RewardRunner(Protocol):
    """Runs one function; up to ``width`` calls of it at a time."""

    @property
    def width(self) -> int: ...

    @property
    def signature(self) -> Signature: ...

    def run(self, calls: Sequence[Call], *, timeout_s: float) -> list[Answer]:
        """An answer for each of at most ``width`` calls, which run at once and have ``timeout_s`` each."""
        ...


class ThreadRunner:
    """Runs a function on a thread of this process."""

    width = 1

    def __init__(self, function: Callable[..., Any], thread: CallThread) -> None:
        self.signature = signature_of(function)
        self._function = function
        self._thread = thread

    def run(self, calls: Sequence[Call], *, timeout_s: float) -> list[Answer]:
        return [self._run(call, timeout_s) for call in calls]

    def _run(self, call: Call, timeout_s: float) -> Answer:
        log = CallLog(call.count)
        arguments = {**call.arguments, **log.arguments(call.logs)}
        outcome = self._thread.call(self._function, arguments, timeout_s=timeout_s)
        if outcome.hung:
            return Answer(failure=hung(timeout_s))
        if outcome.error is not None:
            return Answer(failure=raised(self._function, outcome.error))
        return answer_of(outcome.result, call.count, log.logged())


def answer_of(result: object, count: int, logged: Logged) -> Answer:
    """What a function returned for ``count`` completions, as an answer."""
    values = read_rewards(result, count)
    if isinstance(values, BadValue):
        return Answer(failure=Failure(values.what, VALUE_REMEDY))
    return Answer(values=values, logged=logged)


def hung(timeout_s: float) -> Failure:
    """The call did not return in time."""
    return Failure(f"did not return within {timeout_s:g} s", HANG_REMEDY, costly=True)


def raised(function: Callable[..., Any], error: BaseException) -> Failure:
    """The call raised; the innermost line of the function's own file is named."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    by_signal = any(text in str(error) for text in ("signal.alarm", "signal only works in main thread"))
    return Failure(
        f"raised {describe_exception(error, code.co_filename if code else None)}",
        SIGNAL_REMEDY if by_signal else RAISE_REMEDY,
        traceable=True,
        cause=error,
    )


def signature_of(function: Callable[..., Any]) -> Signature:
    """What a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return Signature(None, ())
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in parameters if parameter.kind not in variable]
    required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return Signature(None, required)
    return Signature(frozenset(parameter.name for parameter in named), required)
