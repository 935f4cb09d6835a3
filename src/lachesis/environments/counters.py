"""Counters of what an environment did since it last reported, and in all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lachesis.environments.records import ScoredGroup


@dataclass(slots=True)
class Counters:
    """``dropped`` and ``set_aside`` count groups by reason: those not sent, and those the API put away."""

    groups: int = 0
    sequences: int = 0
    score_sum: float = 0.0
    trained_tokens: int = 0
    group_seconds: float = 0.0
    failures: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    set_aside: Counter[str] = field(default_factory=Counter)

    def count_sent(self, group: ScoredGroup) -> None:
        """Count a group that the API took in."""
        self.groups += 1
        self.sequences += group.size
        self.score_sum += sum(group.scores)
        self.trained_tokens += group.trained

    def add(self, other: Counters) -> None:
        """Add the counts of another one."""
        for name in ("groups", "sequences", "score_sum", "trained_tokens", "group_seconds", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped += other.dropped
        self.set_aside += other.set_aside

    def values(self) -> dict[str, float]:
        """As metrics; means only where there is something to take them of."""
        values: dict[str, float] = {
            "groups": self.groups,
            "sequences": self.sequences,
            "trained_tokens": self.trained_tokens,
            "failures": self.failures,
            "dropped": self.dropped.total(),
            "set_aside": self.set_aside.total(),
        }
        if self.sequences:
            values["score/mean"] = self.score_sum / self.sequences
            values["completion_length/mean"] = self.trained_tokens / self.sequences
        if self.groups:
            values["group_seconds/mean"] = self.group_seconds / self.groups
        return values
