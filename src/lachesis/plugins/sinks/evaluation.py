"""Evaluations as values, for sinks that know only names and numbers."""

from __future__ import annotations

from lachesis.common.types import EvalResult
from lachesis.metrics.names import BY_SOURCE


def evaluation_values(result: EvalResult) -> dict[str, float]:
    """Return an evaluation as metric values by name."""
    return {
        "evaluation/accuracy": result.accuracy,
        "evaluation/mean_reward": result.mean_reward,
        **({} if result.pass_at_k is None else {"evaluation/pass_at_k": result.pass_at_k}),
        "evaluation/mean_length": result.mean_length,
        "evaluation/seconds": result.seconds,
        **{f"evaluation/{name}/{key}": value for name, of in result.benchmarks.items() for key, value in of.items()},
        **{
            f"{BY_SOURCE}{source}/evaluation/{name}": value
            for source, values in result.by_source.items()
            for name, value in values.items()
        },
    }
