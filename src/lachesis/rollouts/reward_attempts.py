"""One reward function with a deadline: if a call fails, who is to blame, and what can be kept."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lachesis.errors import RewardError
from lachesis.rollouts.imports import describe_exception, nearest
from lachesis.rollouts.reward_calls import BadValue, CallThread, read_rewards, shorten
from lachesis.types import Group

Rewards: TypeAlias = list[float | None]
Values: TypeAlias = Sequence[float | BadValue | None]

# What a function is given beside the columns of the dataset.
GIVEN = ("prompts", "completions", "completion_ids")
# Scoring group by group, to find the one that hangs, gives up after this many hangs in a row.
_MOST_HANGS = 3

_HANG_REMEDY = "make it faster or give what it waits for a timeout, or raise rewards.timeout_s"
_VALUE_REMEDY = "return a list with a finite number per completion, or None where the function abstains"
_RAISE_REMEDY = "mend it, or let it return None for completions that it cannot judge"
_SIGNAL_REMEDY = (
    "reward functions run on a thread of their own, where signal.alarm does not work: turn such timeouts off "
    "(math_verify: parsing_timeout=None and timeout_seconds=None); rewards.timeout_s limits the call"
)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a call gave no list of rewards; ``what`` continues "reward function 'accuracy' ..."."""

    what: str
    remedy: str
    hung: bool = False
    cause: BaseException | None = None


class RewardAttempts:
    """Calls one function for all groups and, where that fails, for each group alone."""

    def __init__(self, name: str, function: Callable[..., Any], *, thread: CallThread, timeout_s: float) -> None:
        self._name = name
        self._function = function
        self._thread = thread
        self._timeout_s = timeout_s
        self._accepted, self._required = _signature(function)

    def check_columns(self, columns: frozenset[str]) -> None:
        """Raises RewardError where the function needs an argument that is neither given nor a column."""
        known = sorted(columns.difference(GIVEN))
        for name in self._required:
            if name in columns or name in GIVEN:
                continue
            close = nearest(name, [*known, *GIVEN])
            raise RewardError(
                f"reward function {self._name!r} needs {name!r}, which is none of {', '.join(GIVEN)} "
                f"and no column of the dataset ({', '.join(known) or 'it has none'})",
                remedy=f"did you mean {close!r}?" if close else "add the column, or give it a default",
            )

    def score(self, groups: Sequence[Group], *, fail_fast: bool) -> tuple[list[Rewards | None], list[RewardError]]:
        """Rewards of each group, ``None`` for a group that the function failed on, and what went wrong.

        Raises:
            RewardError: the first failure, with ``fail_fast``.
        """
        answer = self._call(groups)
        if not isinstance(answer, _Failure):
            results = [self._check(group, values) for group, values in _by_group(groups, answer)]
        elif len(groups) == 1:
            results = [self._error(groups[0], answer, self._culprit(groups[0], answer))]
        else:
            results = self._one_by_one(groups, fail_fast=fail_fast)
        errors = [result for result in results if isinstance(result, RewardError)]
        if isinstance(answer, _Failure) and not errors:
            errors = [self._error_of_all(groups, answer)]
        if errors and fail_fast:
            raise errors[0]
        return [None if isinstance(result, RewardError) else result for result in results], errors

    def _one_by_one(self, groups: Sequence[Group], *, fail_fast: bool) -> list[Rewards | RewardError]:
        """Each group alone. In the first one that fails, the sample to blame is looked for too."""
        results: list[Rewards | RewardError] = []
        hangs, failures = 0, 0
        for group in groups:
            if hangs == _MOST_HANGS:
                what = f"was not called any more, after {hangs} calls in a row that hung,"
                results.append(self._error(group, _Failure(what, _HANG_REMEDY), None))
                continue
            answer = self._call([group])
            if isinstance(answer, _Failure):
                culprit = self._culprit(group, answer) if failures == 0 else None
                results.append(self._error(group, answer, culprit))
                failures += 1
                hangs = hangs + 1 if answer.hung else 0
            else:
                results.append(self._check(group, answer))
                hangs = 0
            if fail_fast and isinstance(results[-1], RewardError):
                break
        return results

    def _culprit(self, group: Group, failure: _Failure) -> int | None:
        """The first sample that an exception is raised for when it is scored alone."""
        if failure.cause is None:
            return None
        for index, sample in enumerate(group.samples):
            if isinstance(self._call([dataclasses.replace(group, samples=(sample,))]), _Failure):
                return index
        return None

    def _call(self, groups: Sequence[Group]) -> Values | _Failure:
        arguments = _arguments(groups, self._accepted)
        outcome = self._thread.call(self._function, arguments, timeout_s=self._timeout_s)
        if outcome.hung:
            return _Failure(f"did not return within {self._timeout_s:g} s", _HANG_REMEDY, hung=True)
        if outcome.error is not None:
            return _raised(self._function, outcome.error)
        answer = read_rewards(outcome.result, sum(len(group.samples) for group in groups))
        return _Failure(answer.what, _VALUE_REMEDY) if isinstance(answer, BadValue) else answer

    def _check(self, group: Group, values: Values) -> Rewards | RewardError:
        rewards: Rewards = []
        for index, value in enumerate(values):
            if isinstance(value, BadValue):
                return self._error(group, _Failure(value.what, _VALUE_REMEDY), index)
            rewards.append(value)
        return rewards

    def _error(self, group: Group, failure: _Failure, sample: int | None) -> RewardError:
        return self._as_error(failure, f"on {_describe(group, sample)}")

    def _error_of_all(self, groups: Sequence[Group], failure: _Failure) -> RewardError:
        return self._as_error(failure, f"on {len(groups)} groups together, though on none of them alone")

    def _as_error(self, failure: _Failure, where: str) -> RewardError:
        error = RewardError(f"reward function {self._name!r} {failure.what} {where}", remedy=failure.remedy)
        error.__cause__ = failure.cause
        return error


def _raised(function: Callable[..., Any], error: BaseException) -> _Failure:
    code = getattr(inspect.unwrap(function), "__code__", None)
    by_signal = any(text in str(error) for text in ("signal.alarm", "signal only works in main thread"))
    return _Failure(
        f"raised {describe_exception(error, code.co_filename if code else None)}",
        _SIGNAL_REMEDY if by_signal else _RAISE_REMEDY,
        cause=error,
    )


def _signature(function: Callable[..., Any]) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Keywords that ``function`` takes (``None``: any) and those that it cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return None, ()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in parameters if parameter.kind not in variable]
    required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None, required
    return frozenset(parameter.name for parameter in named), required


def _arguments(groups: Sequence[Group], accepted: frozenset[str] | None) -> dict[str, Any]:
    """Keyword arguments of one call. The lists are made for this call: a function may change them."""

    def wanted(name: str) -> bool:
        return accepted is None or name in accepted

    def per_sample(of_group: Sequence[Any]) -> list[Any]:
        return [value for group, value in zip(groups, of_group, strict=True) for _ in group.samples]

    columns = dict.fromkeys(name for group in groups for name in group.prompt.columns)
    arguments: dict[str, Any] = {
        name: per_sample([group.prompt.columns.get(name) for group in groups]) for name in filter(wanted, columns)
    }
    samples = [sample for group in groups for sample in group.samples]
    if wanted("completions"):
        arguments["completions"] = [[{"role": "assistant", "content": sample.text}] for sample in samples]
    if wanted("completion_ids"):
        arguments["completion_ids"] = [list(sample.completion_ids) for sample in samples]
    if wanted("prompts"):
        prompts = [group.prompt for group in groups]
        arguments["prompts"] = per_sample([list(p.messages) if p.messages else p.text for p in prompts])
    return arguments


def _by_group(groups: Sequence[Group], values: Values) -> Iterator[tuple[Group, Values]]:
    start = 0
    for group in groups:
        yield group, values[start : start + len(group.samples)]
        start += len(group.samples)


def _describe(group: Group, sample: int | None) -> str:
    """Where it happened, short enough for one line: prompt id, completion text, columns."""
    columns = ", ".join(f"{name}={shorten(value)}" for name, value in group.prompt.columns.items())
    prompt = f"prompt {group.prompt.id!r} ({columns})" if columns else f"prompt {group.prompt.id!r}"
    count = len(group.samples)
    if sample is None:
        return f"the {count} completions of {prompt}"
    return f"completion {sample + 1} of {count} of {prompt}: {shorten(group.samples[sample].text, limit=120)}"
