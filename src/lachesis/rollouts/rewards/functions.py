"""Call of a reward function: its arguments, its log, its result, and the reasons of a failure."""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lachesis.common.imports import describe_exception
from lachesis.common.types import LARGEST_NUMBER
from lachesis.process.threads import CallOutcome

HANG_REMEDY = "make it faster, give its waits a timeout, or raise rewards.timeout_s"
VALUE_REMEDY = "return a list with a finite number for each completion, or None for one that it does not judge"
RAISE_REMEDY = "correct it, or let it return None for completions that it cannot judge"
# Remedies by a part of the error's text.
_TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("remedies.toml").read_text("utf-8"))["remedies"]
_REMEDIES = {text: str(row["remedy"]) for row in _TABLE for text in row["texts"]}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of training: optimizer steps done, and steps in all (0 if unknown)."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True)
class Logged:
    """Log of one call: a value per completion for each column, and numbers for each metric."""

    extras: Mapping[str, list[Any]] = field(default_factory=dict)
    metrics: Mapping[str, list[float]] = field(default_factory=dict)


class CallLog:
    """Collector of the values that one call of a reward function logs."""

    NAMES = ("log_extra", "log_metric")

    def __init__(self, count: int) -> None:
        """``count``: completions of the call."""
        self._count = count
        self._extras: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def arguments(self, wanted: Collection[str]) -> dict[str, Callable[..., None]]:
        """Return those of ``log_extra`` and ``log_metric`` that a function wants."""
        return {name: getattr(self, name) for name in self.NAMES if name in wanted}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Keep a value for each completion. Raise ValueError if there are more or fewer."""
        listed = list(values)
        if len(listed) != self._count:
            raise ValueError(f"log_extra({column!r}) got {len(listed)} values for {self._count} completions")
        self._extras[column] = listed

    def log_metric(self, name: str, value: float) -> None:
        """Add to a metric, whose mean is shown. Raises ValueError if the value is not finite."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}) got {number}, which is not finite")
        self._metrics.setdefault(name, []).append(number)

    def logged(self) -> Logged:
        """Return the whole log."""
        return Logged(self._extras, self._metrics)


@dataclass(frozen=True, slots=True)
class Signature:
    """Keywords that a function takes (``None``: any), and the required ones."""

    accepted: frozenset[str] | None
    required: tuple[str, ...]

    def takes(self, name: str) -> bool:
        """Return True if it may be called with this keyword."""
        return self.accepted is None or name in self.accepted


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Reason why a call gave no list of rewards; ``what`` continues "reward function 'accuracy' ...".

    ``costly``: it took its time or its process, so it should not be repeated without need. ``traceable``: calling it
    with each sample alone can tell which one it was. ``between_processes``: a value could not go to the function's
    process or come back from there, for which the function is not to blame.
    """

    what: str
    remedy: str
    costly: bool = False
    traceable: bool = False
    between_processes: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RewardCall:
    """Arguments of one call on ``count`` completions, and the kinds of log it may use (names of ``CallLog.NAMES``)."""

    arguments: Mapping[str, Any]
    count: int
    logs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a call: a value per completion, or a failure."""

    values: Sequence[float | BadValue | Excluded | None] = ()
    failure: RewardFailure | None = None
    logged: Logged = field(default_factory=Logged)


@dataclass(frozen=True, slots=True)
class Excluded:
    """Stand-in for the reward of a completion that could not be judged, for a cause that it has no part in.

    It leaves its group, whatever other functions say of it, and is counted by its cause. ``why`` is for the log.
    """

    cause: str
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.counted:
            raise ValueError("Excluded needs a cause: a word or two, under which such completions are counted")

    @property
    def counted(self) -> str:
        """Return the cause in the form of a metric's name: "no reward reported" becomes ``no_reward_reported``."""
        return "_".join(re.findall(r"\w+", self.cause.lower()))


# The functions that factories of the registries make; a user's function may be asynchronous too.
Reward: TypeAlias = Callable[..., Sequence[float | Excluded | None]]


@dataclass(frozen=True, slots=True)
class BadValue:
    """Description of a value that is not a reward."""

    what: str


def answer_of(
    function: Callable[..., Any],
    call: RewardCall,
    invoke: Callable[[Mapping[str, Any]], CallOutcome],
    *,
    timeout_s: float = math.inf,
) -> Answer:
    """Call ``function`` through ``invoke``, which gets the arguments, and return the result."""
    log = CallLog(call.count)
    outcome = invoke({**call.arguments, **log.arguments(call.logs)})
    if outcome.hung:
        return Answer(failure=hung(timeout_s))
    if outcome.error is not None:
        return Answer(failure=raised(function, outcome.error))
    values = read_rewards(outcome.result, call.count)
    if isinstance(values, BadValue):
        return Answer(failure=RewardFailure(values.what, VALUE_REMEDY))
    return Answer(values=values, logged=log.logged())


def hung(timeout_s: float) -> RewardFailure:
    """Return the failure of a call that did not return in time."""
    return RewardFailure(f"did not return within {timeout_s:g} s", HANG_REMEDY, costly=True)


def raised(function: Callable[..., Any], error: BaseException) -> RewardFailure:
    """Return the failure of a call that raised; it names the innermost line of the function's own file."""
    remedy = next((remedy for text, remedy in _REMEDIES.items() if text in str(error)), RAISE_REMEDY)
    return RewardFailure(f"raised {describe_exception(error, function)}", remedy, traceable=True, cause=error)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the arguments that a function takes."""
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


def read_rewards(result: object, count: int) -> list[float | BadValue | Excluded | None] | BadValue:
    """Return the rewards of ``count`` completions as floats, ``None`` where the function abstained.

    Numbers may be Python's, numpy's or torch's; the list may be an array or a tensor of shape [count].
    A value that is not finite, or that no trainer could use, comes back as :class:`BadValue` in its
    place; a result that is not a list of this length as one :class:`BadValue`.
    """
    if callable(to_list := getattr(result, "tolist", None)):
        result = to_list()
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        return BadValue(f"returned {_phrase(result)}, not a list with one reward per completion")
    if len(result) != count:
        return BadValue(f"returned {len(result)} rewards for {count} completions")
    return [_read_value(value) for value in result]


def _read_value(value: object) -> float | BadValue | Excluded | None:
    if value is None or isinstance(value, Excluded):
        return value
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # type: ignore[attr-defined]
    if not isinstance(number, float | int):
        return BadValue(f"returned {_phrase(value)} as a reward")
    try:
        number = float(number)
    except OverflowError:
        return BadValue("returned an integer too large for a reward")
    if abs(number) > LARGEST_NUMBER and math.isfinite(number):
        return BadValue(f"returned {number:g} as a reward; the limit is {LARGEST_NUMBER:g}")
    return number if math.isfinite(number) else BadValue(f"returned {number} as a reward")


def _phrase(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({shorten(value)})"


def shorten(value: object, limit: int = 60) -> str:
    """Return the ``repr`` for messages, cut after ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
