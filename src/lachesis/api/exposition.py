"""GET /metrics: the state in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import time
from collections.abc import Iterable

from lachesis.api.state import RolloutState

_PREFIX = "lachesis_api_"


def exposition(state: RolloutState, *, refused: int) -> str:
    """All metrics. Totals count from the start of the server or its last reset."""
    intake, deliveries = state.intake, state.deliveries
    lines = [
        *_metric("step", "gauge", "Batches delivered, from the trainer's starting step on.", state.step),
        *_metric("queue_groups", "gauge", "Groups queued.", len(intake.queue)),
        *_metric("queue_tokens", "gauge", "Tokens queued and buffered, as the limit counts them.", intake.weight),
        *_metric("received_groups_total", "counter", "Groups received.", intake.received.groups),
        *_metric("received_tokens_total", "counter", "Tokens received.", intake.received.tokens),
        *_metric("set_aside_groups_total", "counter", "Groups no trainer could use.", intake.set_aside.count),
        *_metric("delivered_batches_total", "counter", "Batches delivered.", state.delivered.batches),
        *_metric("delivered_sequences_total", "counter", "Sequences delivered.", state.delivered.sequences),
        *_metric("delivered_tokens_total", "counter", "Tokens delivered.", state.delivered.tokens),
        *_metric("redelivered_batches_total", "counter", "Batches delivered again.", deliveries.redelivered),
        *_metric("outstanding_batches", "gauge", "Batches not acknowledged yet.", len(deliveries.outstanding)),
    ]
    refusals = [({"reason": "full"}, intake.received.full), ({"reason": "malformed"}, refused)]
    lines += _family("refused_requests_total", "counter", "Requests refused.", refusals)
    if intake.limit is not None:
        lines += _metric("queue_tokens_limit", "gauge", "Most tokens that may be queued.", intake.limit)
    return "\n".join([*lines, *_environments(state)]) + "\n"


def _environments(state: RolloutState) -> list[str]:
    now = time.monotonic()
    envs = [({"environment": env.name}, env) for env in state.environments]
    queue = state.intake.queue.sequences
    queued = [({"environment": env.name}, queue.get(env.id, 0)) for _, env in envs]
    unnamed = sum(count for env_id, count in queue.items() if state.environments.get(env_id) is None)
    queued.append(({"environment": ""}, unnamed))
    return [
        *_family("queue_sequences", "gauge", "Sequences queued.", queued),
        *_family(
            "environment_groups_total", "counter", "Groups received.", [(label, env.groups) for label, env in envs]
        ),
        *_family(
            "environment_score",
            "gauge",
            "Running mean of the scores.",
            [(label, env.score) for label, env in envs if env.score is not None],
        ),
        *_family(
            "environment_silent_seconds",
            "gauge",
            "Seconds since the environment was last heard from.",
            [(label, round(now - env.last_seen, 3)) for label, env in envs],
        ),
    ]


def _metric(name: str, kind: str, text: str, value: float) -> list[str]:
    return _family(name, kind, text, [({}, value)])


def _family(name: str, kind: str, text: str, values: Iterable[tuple[dict[str, str], float]]) -> list[str]:
    lines = [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]
    return lines + [f"{_PREFIX}{name}{_labels(labels)} {value}" for labels, value in values]


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
