"""Types of the health rules: observations of a run, and alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lachesis.common.types import EvalResult, Group, Level
from lachesis.metrics.names import BY_SOURCE


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Thresholds that depend on the run.

    ``staleness`` in weight versions; ``canary_ratio`` as a multiple of the proof of sync's limit; ``logprob_diff``
    in nats (the mean absolute difference between trainer and engine; 16-bit weights on two different kernels differ by
    about 0.01).
    ``sync_every`` is the number of steps between weight updates; ``environments`` is true if rollouts come from
    environments. ``template_marks`` are the model's marks of turns: such tokens, and the marks in its own chat
    template; ``None`` if it has no template. ``clipped_fraction`` is the healthy share of clipped ratios; ``None`` if
    bounds are narrow or ratios are products over sequences, so that most may be clipped by design. ``ratio_of_tokens``
    is false for such products, which are far from 1 once tokens are a little off; ``clips`` is false if the loss bounds
    the policy in another way than by clipping ratios; ``group_baseline`` is false if groups of equal rewards have
    advantages. ``unscaled`` is true if advantages are on the scale of the rewards.
    """

    staleness: float = 4.0
    canary_ratio: float = 1.0
    logprob_diff: float = 0.05
    sync_every: int = 1
    environments: bool = False
    template_marks: frozenset[str] | None = None
    clipped_fraction: float | None = 0.3
    ratio_of_tokens: bool = True
    clips: bool = True
    group_baseline: bool = True
    unscaled: bool = False


@dataclass(frozen=True, slots=True)
class GroupDigest:
    """Digest of a generated group that outlives its step.

    ``rewards`` and ``lengths`` (in tokens) are those of the completions with a reward, ``texts`` are equal for equal
    completions, and ``nats`` is how unlikely the first tokens were on average: an estimate of the entropy at sampling.
    ``prompt`` and ``answer`` are equal for equal prompts, and for equal answers of rows. ``answer_told`` is true if the
    prompt contains its row's answer, and ``others_told`` is the share of the step's other answers in it; both are
    ``None`` if rows have no answer. ``source`` names one of several sources.
    """

    prompt: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    texts: tuple[int, ...]
    truncated: int
    empty: int
    nats: float | None = None
    answer: int | None = None
    answer_told: bool | None = None
    others_told: float | None = None
    source: str = ""

    @property
    def flat(self) -> bool:
        """Return True if at least two completions have a reward, and all have the same."""
        return len(self.rewards) > 1 and max(self.rewards) == min(self.rewards)


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of one step for the rules.

    ``history`` holds the values of earlier steps, oldest first.

    ``batches`` are the generated groups of the last steps, the newest last; a batch that several steps train on appears
    once.
    """

    step: int
    values: Mapping[str, float]
    groups: Sequence[Group] = ()
    history: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[EvalResult] = ()
    batches: Sequence[Sequence[GroupDigest]] = ()
    limits: HealthLimits = field(default_factory=HealthLimits)

    def of_source(self, source: str) -> Observation:
        """Return the view of one of several sources: its groups, and its metrics without its name."""
        measured = partial(_values_of_source, source=source)
        return replace(
            self,
            values=measured(self.values),
            history=tuple(map(measured, self.history)),
            groups=[group for group in self.groups if group.prompt.source == source],
            batches=[own for batch in self.batches if (own := [group for group in batch if group.source == source])],
        )

    def above(self, name: str, limit: float) -> float | None:
        """Return this step's value if it was measured and is above ``limit``, or is NaN."""
        value = self.values.get(name)
        return None if value is None or value <= limit else value

    def recent(self, name: str, count: int) -> list[float]:
        """Return the values of the last ``count`` steps including this one, oldest first, where measured."""
        steps = (*self.history, self.values)[-count:] if count else ()
        return [step[name] for step in steps if name in step]

    def latest(self, groups: int, *, completions: int = 0, batches: int = 50) -> list[GroupDigest]:
        """Return the groups of the newest batches with at least these numbers of groups and completions, or of batches.

        None if there are fewer.
        """
        found: list[GroupDigest] = []
        for count, batch in enumerate(reversed(self.batches), start=1):
            found = [*batch, *found]
            enough = len(found) >= groups and sum(len(group.rewards) for group in found) >= completions
            if enough or count >= batches:
                return found
        return []

    def reward_range(self) -> tuple[float, float]:
        """Return the smallest and the largest remembered reward of a completion; 0 and 1 if there is none."""
        rewards = [reward for batch in self.batches for group in batch for reward in group.rewards]
        return (min(rewards), max(rewards)) if rewards else (0.0, 1.0)


def _values_of_source(values: Mapping[str, float], *, source: str) -> dict[str, float]:
    prefixes = {f"{BY_SOURCE}{source}/": "", f"rewards/{source}/": "rewards/"}
    return {
        f"{kept}{name.removeprefix(prefix)}": value
        for name, value in values.items()
        for prefix, kept in prefixes.items()
        if name.startswith(prefix)
    }


@dataclass(frozen=True, slots=True)
class Alarm:
    """Alarm of a rule.

    ``severity`` compares alarms of the same rule: larger is worse.
    """

    level: Level
    message: str
    severity: float = 1.0
