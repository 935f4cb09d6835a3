"""Tasks of the library reasoning-gym, generated on demand, and its scoring of answers as a reward."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from lachesis.common.errors import ConfigError, did_you_mean
from lachesis.common.imports import optional_package
from lachesis.rollouts.tagged_text import tagged

_SIZE = 1000
# The library makes its problem number i from seed + i, so neighbouring seeds have almost the same problems.
_APART = 1 << 32
# A comma that begins another task, as opposed to one in a list among a task's options.
_NEXT = re.compile(r",(?=\w+(?:[?,]|$))")


@dataclass(frozen=True, slots=True)
class Task:
    """Data set of the library: its name, number of problems, seed and further options."""

    name: str
    size: int
    seed: int
    options: Mapping[str, Any]


def parse_tasks(spec: str) -> list[Task]:
    """Parse the tasks in ``reasoning_gym:chain_sum?size=500&max_terms=3,leg_counting``.

    Raises:
        ConfigError: a name is unknown, or the syntax is wrong.
        DependencyError: reasoning-gym is not installed.
    """
    return [_parse(part) for part in _NEXT.split(spec.removeprefix("reasoning_gym:"))]


def _parse(part: str) -> Task:
    name, _, query = part.partition("?")
    known = _library().factory.DATASETS
    if name not in known:
        listed = f"it has {', '.join(sorted(known)[:8])} and {len(known) - 8} more"
        remedy = did_you_mean(name, sorted(known), otherwise=listed)
        raise ConfigError(f"reasoning_gym has no task {name!r}", remedy=remedy)
    options = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    size, seed = options.pop("size", _SIZE), options.pop("seed", 0)
    if not isinstance(size, int) or not isinstance(seed, int) or size < 1:
        raise ConfigError(f"{part!r}: size and seed must be whole numbers", remedy="write size=500&seed=1")
    return Task(name, size, seed, options)


def entries(task: Task) -> Iterator[dict[str, Any]]:
    """Yield the task's problems: ``question``, ``answer`` and the ``metadata`` that the scoring needs.

    No two seeds make a problem from the same number.

    Raises:
        ConfigError: the library does not know an option, or a value of one.
    """
    try:
        made = _library().create_dataset(task.name, size=task.size, seed=task.seed * _APART, **task.options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning_gym cannot make {task.name!r} with {dict(task.options)}: {error}", remedy="correct the options"
        ) from error
    return (dict(made[index]) for index in range(task.size))


def score_answer(entry: Mapping[str, Any], text: str) -> float:
    """Score an answer from 0 to 1 by the task itself: the content of ``<answer>`` tags, or else the text."""
    found = list(tagged(text, "<answer>", "</answer>"))
    answer = found[-1] if found else text
    return float(_scorer(entry["metadata"]["source_dataset"])(answer.strip(), dict(entry)))


def score(completions: Sequence[Any], entry: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
    """Score each answer by its task, 0 to 1. ``entry`` is the column of ``reasoning_gym:`` data."""
    return [score_answer(one, _text(completion)) for one, completion in zip(entry, completions, strict=True)]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


@functools.cache
def _scorer(name: str) -> Any:
    return _library().get_score_answer_fn(name)


@functools.cache
def _library() -> Any:
    why = "reasoning_gym tasks need the package reasoning-gym"
    return optional_package("reasoning_gym", why, remedy="pip install 'lachesis[reasoning-gym]'")


def _value(text: str) -> Any:
    """Parse a number, a list or another value of JSON; return any other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
