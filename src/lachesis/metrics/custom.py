"""Custom sinks and health rules, named by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lachesis.common.contracts import Part, contract, load_part, spec_of
from lachesis.common.errors import LachesisError
from lachesis.common.types import LEVELS
from lachesis.metrics.health.rules import RULES, Rule
from lachesis.metrics.health.types import Alarm, Observation
from lachesis.metrics.hub import Sink


class CustomSink(Protocol):
    """Signature of a custom sink: the run's directory first, the others by name if declared."""

    def __call__(self, run_dir: Path, *, settings: Mapping[str, Any], resume_step: int | None) -> Sink:
        """Return the sink.

        Args:
            run_dir: the run's directory.
            settings: the whole configuration, as plain data.
            resume_step: the step that a resumed run continues from; records of later steps are void. ``None`` for a new
                run.
        """
        ...


class CustomRule(Protocol):
    """Signature of a custom health rule: a function of the observation of one step."""

    def __call__(self, seen: Observation) -> Alarm | None:
        """Return an alarm that says what is wrong and what to change, or None.

        ``seen.values`` are this step's metrics.
        """
        ...


SINK = contract("sink", CustomSink, error=LachesisError, makes=Sink, methods=("write", "evaluation", "close"))
HEALTH_RULE = contract("health rule", CustomRule, error=LachesisError)

Given = str | Mapping[str, Any]


def custom_sinks(
    given: Sequence[Given], *, run_dir: Path, settings: Mapping[str, Any], resume_step: int | None
) -> list[Sink]:
    """Load the sinks that a configuration names.

    Raises ConfigError if one is not a sink.
    """
    return [load_part(one, SINK).make(run_dir, settings=settings, resume_step=resume_step) for one in given]


def custom_rules(given: Sequence[Given]) -> dict[str, Rule]:
    """Load the rules that a configuration names, by function name, or by the whole import path if that is taken.

    A rule that raises, or returns anything but an alarm, causes a LachesisError that names it.

    Raises:
        ConfigError: one is not a rule.
    """
    found: dict[str, Rule] = {}
    for one in given:
        spec, _ = spec_of(one)
        name = spec.replace(":", ".").rpartition(".")[2]
        found[spec if name in found or name in RULES else name] = _checked(load_part(one, HEALTH_RULE))
    return found


def _checked(part: Part) -> Rule:
    def rule(seen: Observation) -> Alarm | None:
        said = part(seen)
        if said is None or (isinstance(said, Alarm) and said.level in LEVELS):
            return said
        raise LachesisError(
            f"{part.title} returned {said!r}, not a lachesis.Alarm of level {', '.join(LEVELS)}",
            remedy="return an Alarm, or None",
        )

    return rule
