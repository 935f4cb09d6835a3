"""Selection and order of problems, by columns such as their difficulty and tags."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.common.errors import DataError, did_you_mean
from lachesis.common.types import Prompt

# The minimum probability of sampling a problem: even one solved always or never may change.
_LEAST_CHANCE = 0.1
# The weight of a group's pass rate in the running mean.
_NEWEST = 0.5


@dataclass(eq=False)
class PassRates:
    """Running pass rates of problems, which decide the problems to sample in an epoch.

    A problem with pass rate r is sampled with probability 4·r·(1 - r), the variance of its rewards relative to the
    maximum, but at least 0.1; a new problem is always sampled.

    Args:
        seed: seed of the choice, which otherwise depends only on the epoch and the problem.
        success_reward: minimum reward of a successful completion.
    """

    seed: int
    success_reward: float = 1.0
    _rates: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def note(self, problem: str, rewards: Sequence[float]) -> None:
        """Update the running pass rate of a problem with a group's rewards."""
        if rewards:
            rate = sum(reward >= self.success_reward for reward in rewards) / len(rewards)
            before = self._rates.get(problem, rate)
            self._rates[problem] = before + _NEWEST * (rate - before)

    def wants(self, problem: str, *, epoch: int) -> bool:
        """Return True if the problem is sampled in this epoch."""
        rate = self._rates.get(problem)
        if rate is None:
            return True
        chance = max(_LEAST_CHANCE, 4 * rate * (1 - rate))
        return random.Random(f"{self.seed}:{epoch}:{problem}").random() < chance

    def state_dict(self) -> dict[str, float]:
        """Return the rate of each problem that has been seen."""
        return dict(self._rates)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._rates = dict(state)


# Names of difficulties, from easy to hard.
SCALE = ("trivial", "very easy", "easy", "simple", "medium", "intermediate", "hard", "difficult", "very hard", "expert")


def keep_matching(prompts: Sequence[Prompt], wanted: Mapping[str, Any]) -> list[Prompt]:
    """Return the problems whose columns all match ``wanted``.

    Args:
        prompts: the problems.
        wanted: for each column a value, a list of values of which one must match, or ``{"min": a, "max": b}`` with one
            or both bounds (inclusive). A column with a list matches if one of its entries does. A row without a value
            matches nothing.

    Raises:
        DataError: a column does not exist, a compared one is not a number, or nothing remains.
    """
    for column in wanted:
        _require_column(prompts, column, "data.filter")
    kept = [one for one in prompts if all(_matches(one, column, value) for column, value in wanted.items())]
    if not kept:
        raise DataError(
            f"data.filter keeps none of {len(prompts)} problems", remedy=f"loosen it: {_values_of(prompts, wanted)}"
        )
    return kept


def ranks(prompts: Sequence[Prompt], column: str) -> list[float]:
    """Rank each problem by a column, the easiest lowest: numbers by value, texts by their place in :data:`SCALE`.

    A row without a value comes last.

    Raises:
        DataError: the column does not exist, or a value is neither a number nor in the scale.
    """
    _require_column(prompts, column, "data.order")
    return [_rank(one, column) for one in prompts]


def _rank(prompt: Prompt, column: str) -> float:
    value = prompt.columns.get(column)
    if value is None:
        return float("inf")
    if isinstance(value, str) and (word := value.strip().lower()) in SCALE:
        return float(SCALE.index(word))
    if (number := _number(value)) is None:
        raise DataError(
            f"problem {prompt.id}: data.order is {column!r}, but its value {value!r} there cannot be ordered",
            remedy=f"use numbers, or the words {', '.join(SCALE)}; data.transform can write them",
        )
    return number


def _matches(prompt: Prompt, column: str, wanted: Any) -> bool:
    value = prompt.columns.get(column)
    if value is None:
        return False
    entries = value if isinstance(value, list | tuple) else [value]
    if isinstance(wanted, Mapping):
        return any(_within(prompt, column, entry, wanted) for entry in entries)
    accepted: Collection[Any] = wanted if isinstance(wanted, list | tuple) else [wanted]
    return any(_same(entry, one) for entry in entries for one in accepted)


def _same(value: Any, wanted: Any) -> bool:
    """Return True if two values are equal; numbers may be texts, as in CSV files."""
    return value == wanted or (isinstance(value, str) and not isinstance(wanted, str) and value == str(wanted))


def _within(prompt: Prompt, column: str, value: Any, bounds: Mapping[str, Any]) -> bool:
    number = _number(value)
    if number is None:
        raise DataError(
            f"problem {prompt.id}: data.filter compares {column!r} with numbers, but its value is {value!r}",
            remedy="list the wanted values in data.filter instead",
        )
    return bounds.get("min", number) <= number <= bounds.get("max", number)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _require_column(prompts: Sequence[Prompt], column: str, key: str) -> None:
    names = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
    if column not in names:
        raise DataError(
            f"{key} names the column {column!r}, but the problems have {', '.join(names) or 'no columns'}",
            remedy=did_you_mean(column, names, otherwise="name one of these; a transform may have removed it"),
        )


def _values_of(prompts: Sequence[Prompt], columns: Collection[str]) -> str:
    """Describe the existing values, a few for each column."""
    parts: list[str] = []
    for column in columns:
        values = list(dict.fromkeys(repr(prompt.columns.get(column)) for prompt in prompts))
        parts.append(f"{column} is {', '.join(values[:5])}{', ...' if len(values) > 5 else ''}")
    return "; ".join(parts)
