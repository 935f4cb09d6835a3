"""Health monitor, which runs the rules over each step and does not repeat itself."""

from __future__ import annotations

import logging
import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lachesis.common.errors import LachesisError
from lachesis.common.types import LEVELS, EvalResult, Finding, StepRecord
from lachesis.metrics.health.digests import digest
from lachesis.metrics.health.rules import RULES, Rule, urgency
from lachesis.metrics.health.types import Alarm, GroupDigest, HealthLimits, Observation

logger = logging.getLogger("lachesis")

WORSE = 1.5
# Steps for which a rule must be silent until its finding counts as resolved.
QUIET = 5
# Steps until an unchanged finding is repeated, and steps that are remembered.
_REPEAT_AFTER, _REMEMBERED = 20, 50

# Rules that one of several sources may break while the whole run looks healthy.
OF_A_SOURCE = {"reward_stays_low", "zero_variance", "truncated_often"}

# Remedies for runs with environments, instead of those that name keys of the configuration; longer ones first.
ELSEWHERE: Mapping[str, str] = tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))[
    "elsewhere"
]
_KNOWN = re.compile("|".join(re.escape(words) for words in ELSEWHERE))


def for_environments(message: str) -> str:
    """Return a finding with remedies for runs whose environments generate and score."""
    return _KNOWN.sub(lambda found: ELSEWHERE[found.group()], message)


def alarms(seen: Observation) -> dict[str, Alarm]:
    """Return the alarms of a step by rule, without silent rules. Pure.

    Some rules are also applied to each of several sources, unless they fire for all together: ``RULE/SOURCE``.
    """
    found = {name: alarm for name, rule in RULES.items() if (alarm := rule(seen)) is not None}
    for source in dict.fromkeys(group.prompt.source for group in seen.groups if group.prompt.source):
        alone = seen.of_source(source)
        for name in OF_A_SOURCE - found.keys():
            if (alarm := RULES[name](alone)) is not None:
                found[f"{name}/{source}"] = replace(alarm, message=f"source {source}: {alarm.message}")
    if not seen.limits.environments:
        return found
    return {name: replace(alarm, message=for_environments(alarm.message)) for name, alarm in found.items()}


@dataclass(frozen=True, slots=True)
class _Reported:
    """Finding that was reported at ``step``; ``seen`` is the last step at which its rule fired."""

    step: int
    alarm: Alarm
    seen: int


class HealthMonitor:
    """Monitor with the short history that the rules need, which repeats a finding only when that helps.

    A finding of the same rule is repeated after 20 steps, or at once when its severity grows by half (a
    note only where it was a warning or a problem before), and at once when its level rises. Once its rule has been
    silent for five steps, it is reported as resolved.

    Args:
        limits: thresholds of the run.
        custom: further rules of the user, by name; one that fails is reported once and then turned off.
    """

    def __init__(
        self,
        *,
        limits: HealthLimits | None = None,
        custom: Mapping[str, Rule] | None = None,
    ) -> None:
        self._custom = dict(custom or {})
        self._limits = limits or HealthLimits()
        self._history: deque[Mapping[str, float]] = deque(maxlen=_REMEMBERED)
        self._batches: deque[Sequence[GroupDigest]] = deque(maxlen=_REMEMBERED)
        self._evaluations: list[EvalResult] = []
        self._reported: dict[str, _Reported] = {}

    def evaluation(self, result: EvalResult) -> None:
        """Remember an evaluation that belongs to no step (before the first, or before a resume)."""
        self._evaluations.append(result)

    def examine(self, record: StepRecord) -> tuple[Finding, ...]:
        """Return the findings of a finished step, the worst first, without those reported recently."""
        if record.evaluation is not None:
            self._evaluations.append(record.evaluation)
        batch = digest(record.groups)
        if batch and (not self._batches or batch != self._batches[-1]):
            self._batches.append(batch)
        seen = Observation(
            step=record.step,
            values=record.values,
            groups=record.groups,
            history=tuple(self._history),
            evaluations=tuple(self._evaluations),
            batches=tuple(self._batches),
            limits=self._limits,
        )
        self._history.append(record.values)
        now = alarms(seen) | self._ask_custom(seen)
        fresh = {name: alarm for name, alarm in now.items() if self._is_news(name, alarm, record.step)}
        for name in now.keys() & self._reported.keys():
            self._reported[name] = replace(self._reported[name], seen=record.step)
        self._reported |= {name: _Reported(record.step, alarm, record.step) for name, alarm in fresh.items()}
        found = [Finding(alarm.level, name, alarm.message) for name, alarm in fresh.items()]
        found.sort(key=lambda finding: urgency(finding.rule, finding.level))
        return (*found, *self._resolved(record.step))

    def _ask_custom(self, seen: Observation) -> dict[str, Alarm]:
        found: dict[str, Alarm] = {}
        for name, rule in tuple(self._custom.items()):
            try:
                alarm = rule(seen)
            except LachesisError as error:
                del self._custom[name]
                logger.warning("%s; this rule is off from now on, and training continues", error.message)
            else:
                found |= {} if alarm is None else {name: alarm}
        return found

    def _resolved(self, step: int) -> list[Finding]:
        """Return, and forget, the findings whose rule has been silent for long enough."""
        gone = {name: told for name, told in self._reported.items() if step - told.seen >= QUIET}
        for name in gone:
            del self._reported[name]
        return [
            Finding(told.alarm.level, name, told.alarm.message, resolved=told.seen + 1) for name, told in gone.items()
        ]

    def _is_news(self, name: str, alarm: Alarm, step: int) -> bool:
        last = self._reported.get(name)
        if last is None or LEVELS.index(alarm.level) > LEVELS.index(last.alarm.level):
            return True
        if {alarm.level, last.alarm.level} == {"note"}:
            return False
        return step - last.step >= _REPEAT_AFTER or alarm.severity > WORSE * last.alarm.severity
