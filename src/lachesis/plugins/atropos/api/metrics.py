"""Metrics of the server: ``GET /metrics`` in Prometheus' text format 0.0.4, and ten minutes of samples for a page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from lachesis.plugins.atropos.api.state import RolloutState

INTERVAL_S = 5.0
_SAMPLES = 121
_RATE_SAMPLES = 13
_PREFIX = "lachesis_api_"


def exposition(state: RolloutState, *, refused: int) -> str:
    """Return all metrics as text. Totals count from the start of the server or its last reset."""
    backlog, deliveries = state.backlog, state.deliveries
    lines = [
        *_metric("step", "gauge", "Batches delivered, from the trainer's starting step on.", state.step),
        *_metric("queue_groups", "gauge", "Groups queued.", len(backlog.queue)),
        *_metric("queue_tokens", "gauge", "Tokens queued and buffered, as the limit counts them.", backlog.weight),
        *_metric("received_groups_total", "counter", "Groups received.", backlog.received.groups),
        *_metric("received_tokens_total", "counter", "Tokens received.", backlog.received.tokens),
        *_metric("set_aside_groups_total", "counter", "Groups no trainer could use.", backlog.set_aside.count),
        *_metric("delivered_batches_total", "counter", "Batches delivered.", state.delivered.batches),
        *_metric("delivered_sequences_total", "counter", "Sequences delivered.", state.delivered.sequences),
        *_metric("delivered_tokens_total", "counter", "Tokens delivered.", state.delivered.tokens),
        *_metric("redelivered_batches_total", "counter", "Batches delivered again.", deliveries.redelivered),
        *_metric("outstanding_batches", "gauge", "Batches not acknowledged yet.", len(deliveries.outstanding)),
    ]
    refusals = [({"reason": "full"}, backlog.received.full), ({"reason": "malformed"}, refused)]
    lines += _family("refused_requests_total", "counter", "Requests refused.", refusals)
    if backlog.limit is not None:
        lines += _metric("queue_tokens_limit", "gauge", "Most tokens that may be queued.", backlog.limit)
    return "\n".join([*lines, *_environments(state)]) + "\n"


def _environments(state: RolloutState) -> list[str]:
    now = time.monotonic()
    envs = [({"environment": env.name}, env) for env in state.environments]
    queue = state.backlog.queue.sequences
    queued = [({"environment": env.name}, queue.get(env.id, 0)) for _, env in envs]
    unnamed = sum(count for env_id, count in queue.items() if state.environments.get(env_id) is None)
    queued.append(({"environment": ""}, unnamed))
    silent = [(label, round(now - env.last_seen, 3)) for label, env in envs]
    scores = [(label, env.score) for label, env in envs if env.score is not None]
    groups = [(label, env.groups) for label, env in envs]
    return [
        *_family("queue_sequences", "gauge", "Sequences queued.", queued),
        *_family("environment_groups_total", "counter", "Groups received.", groups),
        *_family("environment_score", "gauge", "Running mean of the scores.", scores),
        *_family("environment_silent_seconds", "gauge", "Seconds since the environment was last heard from.", silent),
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


@dataclass(frozen=True, slots=True)
class ThroughputReading:
    """Totals and the queue's length at one moment of the monotonic clock."""

    at: float
    groups: int
    tokens: int
    batches: int
    queued: int


class History:
    """Samples of a state, taken every :data:`INTERVAL_S` seconds; a reset begins anew."""

    def __init__(self) -> None:
        self._samples: deque[ThroughputReading] = deque(maxlen=_SAMPLES)
        self._epoch = -1

    def sample(self, state: RolloutState, now: float) -> None:
        """Add a sample."""
        if state.epoch != self._epoch:
            self._samples.clear()
            self._epoch = state.epoch
        self._samples.append(_sample(state, now))

    def rates(self, state: RolloutState, now: float) -> dict[str, float]:
        """Return groups and tokens a second and batches a minute, over the last minute or the time since the start."""
        recent = list(self._samples)[-_RATE_SAMPLES:] if state.epoch == self._epoch else []
        last = _sample(state, now)
        seconds = last.at - recent[0].at if recent else 0.0
        if seconds <= 0.0:
            return {"groups_per_s": 0.0, "tokens_per_s": 0.0, "batches_per_min": 0.0}
        first = recent[0]
        return {
            "groups_per_s": (last.groups - first.groups) / seconds,
            "tokens_per_s": (last.tokens - first.tokens) / seconds,
            "batches_per_min": 60.0 * (last.batches - first.batches) / seconds,
        }

    def curves(self, now: float) -> dict[str, list[float]]:
        """Between one sample and the next: rates as above; at each: sequences queued. ``age`` is in seconds."""
        samples = list(self._samples)
        pairs = [(a, b, b.at - a.at) for a, b in pairwise(samples) if b.at > a.at]
        return {
            "age": [round(now - b.at, 1) for _, b, _ in pairs],
            "groups_per_s": [(b.groups - a.groups) / seconds for a, b, seconds in pairs],
            "tokens_per_s": [(b.tokens - a.tokens) / seconds for a, b, seconds in pairs],
            "batches_per_min": [60.0 * (b.batches - a.batches) / seconds for a, b, seconds in pairs],
            "queued": [b.queued for _, b, _ in pairs],
        }


def _sample(state: RolloutState, now: float) -> ThroughputReading:
    return ThroughputReading(
        at=now,
        groups=state.backlog.received.groups,
        tokens=state.backlog.received.tokens,
        batches=state.delivered.batches,
        queued=sum(state.backlog.queue.sequences.values()),
    )
