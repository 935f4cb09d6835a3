"""Reward functions of verifiers 0.1 that raise: its rubrics log that and go on with 0, a reward like any other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

_RAISED = "lachesis_raised"

State = MutableMapping[str, Any]


def note_errors(rubric: Any) -> None:
    """From now on the functions of a rubric, and of those that it is made of, leave in a state what they raised."""
    for one in _rubrics(rubric):
        one.funcs = [_noting(function, of_groups=one._is_group_func(function)) for function in one.funcs]


def take_error(state: State) -> Exception | None:
    """What a reward function raised over a rollout; a further look at it begins anew."""
    return state.pop(_RAISED, None)


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    inner = [*getattr(rubric, "rubrics", ()), *(one.rubric for one in getattr(rubric, "env_map", {}).values())]
    for one in inner:
        yield from _rubrics(one)


def _noting(function: Callable[..., Any], *, of_groups: bool) -> Callable[..., Awaitable[Any]]:
    """The function, as the rubric sees it, and told of the states that it judges whether it asks for them or not."""
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
