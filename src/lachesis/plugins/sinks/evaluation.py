"""Evaluations as values, and a table of completions, for the sinks of services."""

from __future__ import annotations

from typing import Any

from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.names import BY_SOURCE
from lachesis.metrics.sinks.console import CompletionPicker


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


def values_of(record: StepRecord, *, completions: CompletionPicker | None, table: Any) -> dict[str, Any]:
    """Return a step's values by name, with its evaluation and the service's ``table`` of its completions."""
    values: dict[str, Any] = dict(record.values)
    if record.evaluation is not None:
        values |= evaluation_values(record.evaluation)
    if completions is not None and (picked := completions.table(record)) is not None:
        columns, rows = picked
        values["completions"] = table(columns=columns, data=rows)
    return values
