"""Evaluation of an environment on its problems: several rollouts of each, rewards, metrics, and causes of failures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import DataError
from lachesis.process.tasks import together

if TYPE_CHECKING:
    from lachesis.plugins.atropos.environments.base import Evaluable

SUCCESS = 1.0


@dataclass(frozen=True, slots=True)
class Attempts:
    """Finished rollouts of one problem: N rewards and N lengths in tokens; and the reasons why others failed."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    failures: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentEvaluation:
    """Results over all problems. Means are over finished rollouts; a failed one does not count as a reward of 0.

    ``pass_at`` has for each k the share of problems of which one of k rollouts succeeds, by the unbiased estimate
    over finished rollouts; problems with fewer than k are left out of it.
    """

    environment: str
    problems: int
    rollouts: int
    mean_reward: float
    pass_at: Mapping[int, float]
    metrics: Mapping[str, float]
    failures: Mapping[str, int]
    mean_length: float
    seconds: float

    def document(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        return asdict(self) | {"pass_at": {str(k): value for k, value in self.pass_at.items()}}


async def evaluate_environment(
    environment: Evaluable[Any, Any], *, samples: int, greedy: bool = False
) -> EnvironmentEvaluation:
    """Evaluate ``samples`` rollouts of each of the environment's evaluation problems.

    Raises:
        DataError: it has none, or every rollout failed.
    """
    started, items = time.monotonic(), environment.problems()
    if not items:
        raise DataError(f"the environment {environment.name} has no problems to evaluate on", remedy="name another")
    params = environment.sampling(greedy=greedy)
    found = await together(environment.attempts(item, params=params, count=samples) for item in items)
    return summary(environment.name, found, samples=samples, seconds=time.monotonic() - started)


def summary(name: str, found: Sequence[Attempts], *, samples: int, seconds: float) -> EnvironmentEvaluation:
    """Summarize the attempts at all problems. Raises DataError if none was finished."""
    rewards = [reward for one in found for reward in one.rewards]
    failures: Counter[str] = Counter()
    metrics: dict[str, list[float]] = {}
    for one in found:
        failures.update(one.failures)
        for key, values in one.metrics.items():
            metrics.setdefault(key, []).extend(values)
    if not rewards:
        causes = causes_in_words(failures)
        raise DataError(f"no rollout of {name} finished ({causes})", remedy="see the log")
    passed = {k: pass_at(k, found) for k in sizes(samples)}
    return EnvironmentEvaluation(
        environment=name,
        problems=len(found),
        rollouts=len(rewards),
        mean_reward=fmean(rewards),
        pass_at={k: value for k, value in passed.items() if value is not None},
        metrics={key: fmean(values) for key, values in sorted(metrics.items()) if values},
        failures=dict(failures),
        mean_length=fmean(length for one in found for length in one.lengths),
        seconds=seconds,
    )


def causes_in_words(failures: Mapping[str, int]) -> str:
    """Return "sandbox 3, timeout 2"."""
    return ", ".join(f"{cause} {count}" for cause, count in sorted(failures.items()))


def sizes(samples: int) -> list[int]:
    """Return 1, 2, 4, ... and ``samples`` itself."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()) if 2**power <= samples)})


def pass_at(k: int, found: Sequence[Attempts]) -> float | None:
    """Return the mean over problems of 1 - C(n - c, k) / C(n, k), c successes among n; ``None`` if every n < k."""
    shares: list[float] = []
    for one in found:
        n, c = len(one.rewards), sum(reward >= SUCCESS for reward in one.rewards)
        if n >= k:
            shares.append(1 - comb(n - c, k) / comb(n, k))
    return fmean(shares) if shares else None
