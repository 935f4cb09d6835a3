"""What the health rules see of a run, and what they say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lachesis.common.types import EvalResult, Group, Level


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Thresholds that depend on the run.

    ``staleness`` in weight versions; ``canary_ratio`` as a multiple of what the proof of sync allows; ``logprob_diff``
    in nats (the mean absolute difference between trainer and engine; 16-bit weights on two different kernels differ by
    about 0.01).
    ``sync_every`` is after how many steps weights travel; ``environments`` whether rollouts come from them.
    """

    staleness: float = 4.0
    canary_ratio: float = 1.0
    logprob_diff: float = 0.05
    sync_every: int = 1
    environments: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What the rules see of one step. ``history`` holds the values of earlier steps, oldest first."""

    step: int
    values: Mapping[str, float]
    groups: Sequence[Group] = ()
    history: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[EvalResult] = ()
    limits: HealthLimits = field(default_factory=HealthLimits)

    def above(self, name: str, limit: float) -> float | None:
        """The value of this step if it was measured and is above ``limit``; NaN is, too."""
        value = self.values.get(name)
        return None if value is None or value <= limit else value

    def recent(self, name: str, count: int) -> list[float]:
        """The values of the last ``count`` steps with this one, oldest first, where it was measured."""
        steps = (*self.history, self.values)[-count:] if count else ()
        return [step[name] for step in steps if name in step]

    def stays(self, name: str, *, above: float, upto: float) -> bool:
        """Whether the value was in ``(above, upto]`` in each of the last five steps."""
        values = self.recent(name, 5)
        return len(values) == 5 and all(above < value <= upto for value in values)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a rule says. ``severity`` compares alarms of the same rule: larger is worse."""

    level: Level
    message: str
    severity: float = 1.0
