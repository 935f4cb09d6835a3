"""Results of benchmarks, by problem, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lachesis.common.errors import DataError
from lachesis.common.files import write_atomic
from lachesis.common.types import Group
from lachesis.metrics.names import format_share
from lachesis.plugins.benchmarks.statistics import Comparison, Estimate, compare, estimate, pass_at

SUCCESS = 1.0
RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Score:
    """Result of one benchmark.

    Attributes:
        source: dataset and split.
        samples: completions of each problem, k.
        right: of each problem's judged completions, by its id: the number of right ones, and of all.
        mean_length: mean length of a completion, in tokens.
    """

    source: str
    samples: int
    right: Mapping[str, tuple[int, int]]
    mean_length: float

    @classmethod
    def of(cls, groups: Sequence[Group], *, source: str, samples: int) -> Score:
        """Return the score of judged completions; a problem without any is left out. Raises DataError if all are."""
        judged = {
            group.prompt.id: [reward >= SUCCESS for reward in group.rewards if reward is not None] for group in groups
        }
        right = {name: (sum(found), len(found)) for name, found in judged.items() if found}
        if not right:
            raise DataError(f"no completion of {source} could be judged", remedy="check the reward function")
        lengths = [len(sample.completion_ids) for group in groups for sample in group.samples]
        return cls(source, samples, right, fmean(lengths))

    def share(self, problem: str) -> float:
        """Return the share of a problem's judged completions that are right."""
        right, count = self.right[problem]
        return right / count

    @property
    def means(self) -> list[float]:
        """Return the shares of all problems."""
        return [self.share(problem) for problem in self.right]

    @property
    def mean(self) -> Estimate:
        """Mean@k."""
        return estimate(self.means, samples=self.samples)

    @property
    def passed(self) -> Estimate | None:
        """Return pass@k over the problems whose k completions were all judged; None for one completion a problem."""
        whole = [(right, count) for right, count in self.right.values() if count >= self.samples]
        if self.samples == 1 or not whole:
            return None
        return estimate([pass_at(self.samples, samples=count, right=right) for right, count in whole])

    def values(self) -> dict[str, float]:
        """Return the figures by the names of metrics."""
        found = {"mean": self.mean} | ({} if (passed := self.passed) is None else {"pass_at_k": passed})
        values = {"problems": float(len(self.right)), "samples": float(self.samples), "mean_length": self.mean_length}
        for name, one in found.items():
            values |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
        return values

    def sentence(self) -> str:
        """Return "mean@4 31 % (27 to 35 %), pass@4 52 % (46 to 58 %), n = 500 problems"."""
        shares = {f"mean@{self.samples}": self.mean}
        shares |= {} if (passed := self.passed) is None else {f"pass@{self.samples}": passed}
        told = [
            f"{name} {format_share(one.value)} ({100 * one.low:.0f} to {100 * one.high:.0f} %)"
            for name, one in shares.items()
        ]
        return f"{', '.join(told)}, n = {len(self.right)} problems"


def write_results(directory: Path, scores: Mapping[str, Score], *, model: str) -> None:
    """Write all scores as JSON, which :func:`read_results` reads."""
    document = {name: {**asdict(score), "figures": score.values()} for name, score in scores.items()}
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / RESULTS, json.dumps({"model": model, "benchmarks": document}, indent=1) + "\n")


def read_results(directory: Path) -> dict[str, Score]:
    """Read a file of :func:`write_results`. Raises DataError if it is malformed."""
    path = directory / RESULTS
    try:
        document: dict[str, Any] = json.loads(path.read_text("utf-8"))["benchmarks"]
        return {name: _score(row) for name, row in document.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a result of benchmarks: {type(error).__name__} {error}", remedy="evaluate the model again"
        ) from error


def _score(row: Mapping[str, Any]) -> Score:
    right = {name: (int(found[0]), int(found[1])) for name, found in row["right"].items()}
    return Score(row["source"], int(row["samples"]), right, float(row["mean_length"]))


def comparisons(first: Mapping[str, Score], second: Mapping[str, Score]) -> dict[str, Comparison]:
    """Compare two models on their common benchmarks and problems.

    Raises:
        DataError: they have none in common, or one name stands for two datasets.
    """
    found: dict[str, Comparison] = {}
    for name in [name for name in first if name in second]:
        one, other = first[name], second[name]
        if one.source != other.source:
            raise DataError(
                f"{name} is {one.source} in one result, but {other.source} in the other",
                remedy="evaluate both on the same dataset",
            )
        common = [problem for problem in one.right if problem in other.right]
        if common:
            found[name] = compare(*([score.share(problem) for problem in common] for score in (one, other)))
    if not found:
        raise DataError(
            f"the results have no benchmark in common: {', '.join(first)}; {', '.join(second)}",
            remedy="evaluate both on the same benchmarks",
        )
    return found


def gains(now: Mapping[str, Score], first: Mapping[str, Score]) -> dict[str, dict[str, float]]:
    """Return by how much each benchmark that was evaluated before has gained, by the names of metrics."""
    known = {
        name: one
        for name, one in first.items()
        if name in now and one.source == now[name].source and one.right.keys() & now[name].right.keys()
    }
    found = comparisons(now, known) if known else {}
    return {
        name: {"gain": one.gain, "gain_low": one.low, "gain_high": one.high, "gain_p": one.p}
        for name, one in found.items()
    }
