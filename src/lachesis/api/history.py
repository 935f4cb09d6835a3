"""The last ten minutes in samples, for the rates and the curves of the dashboard."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from lachesis.api.state import RolloutState

INTERVAL_S = 5.0
_SAMPLES = 121
_RATE_SAMPLES = 13


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals and the queue's length at one moment of the monotonic clock."""

    at: float
    groups: int
    tokens: int
    batches: int
    queued: int


class History:
    """Samples of a state, taken every :data:`INTERVAL_S` seconds; a reset begins anew."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self._epoch = -1

    def sample(self, state: RolloutState, now: float) -> None:
        """Add a sample."""
        if state.epoch != self._epoch:
            self._samples.clear()
            self._epoch = state.epoch
        self._samples.append(_sample(state, now))

    def rates(self, state: RolloutState, now: float) -> dict[str, float]:
        """Groups and tokens a second and batches a minute, over the last minute or what there is of it."""
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


def _sample(state: RolloutState, now: float) -> Sample:
    return Sample(
        at=now,
        groups=state.intake.received.groups,
        tokens=state.intake.received.tokens,
        batches=state.delivered.batches,
        queued=sum(state.intake.queue.sequences.values()),
    )
