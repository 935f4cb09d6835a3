"""Errors of reward functions of verifiers 0.1: its rubrics log them and continue with 0, a reward like any other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

_RAISED = "lachesis_raised"

State = MutableMapping[str, Any]


def note_errors(rubric: Any) -> None:
    """Make the functions of a rubric, and of its parts, leave their errors in a state from now on."""
    for one in _rubrics(rubric):
        one.funcs = [_noting(function, of_groups=one._is_group_func(function)) for function in one.funcs]


def take_error(state: State) -> Exception | None:
    """Return the error of a reward function over a rollout, and forget it."""
    return state.pop(_RAISED, None)


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    inner = [*getattr(rubric, "rubrics", ()), *(one.rubric for one in getattr(rubric, "env_map", {}).values())]
    for one in inner:
        yield from _rubrics(one)


def _noting(function: Callable[..., Any], *, of_groups: bool) -> Callable[..., Awaitable[Any]]:
    """Wrap a function for the rubric, so that it always gets the states that it judges, and notes errors there."""
    wanted = "states" if of_groups else "state"
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    takes = wanted in signature.parameters or any(one.kind is one.VAR_KEYWORD for one in parameters)

    @functools.wraps(function)
    async def noting(**given: Any) -> Any:
        states: Sequence[State] = given[wanted] if of_groups else [given[wanted]]
        arguments = given if takes else {name: value for name, value in given.items() if name != wanted}
        try:
            result = function(**arguments)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:  # of a user's function, which may raise anything
            for state in states:
                state[_RAISED] = error
            raise

    if not takes:
        parameters.append(inspect.Parameter(wanted, inspect.Parameter.KEYWORD_ONLY))
    noting.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return noting
