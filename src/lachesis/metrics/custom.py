"""Sinks and health rules of the user's own, by import path."""

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
    """What the class or function may take: the run's directory first, the others by name."""

    def __call__(self, run_dir: Path, *, settings: Mapping[str, Any], resume_step: int | None) -> Sink:
        """The sink.

        Args:
            run_dir: the run's directory.
            settings: the whole configuration, as plain data.
            resume_step: the step that the run goes on from; what was written of later ones is void. ``None`` at a
                start.
        """
        ...


class CustomRule(Protocol):
    """A health rule: a function of what is seen of one step."""

    def __call__(self, seen: Observation) -> Alarm | None:
        """What is wrong, with what to change, or ``None``. ``seen.values`` are this step's metrics."""
        ...


SINK = contract("sink", CustomSink, error=LachesisError, makes=Sink, methods=("write", "evaluation", "close"))
HEALTH_RULE = contract("health rule", CustomRule, error=LachesisError)

Given = str | Mapping[str, Any]


def custom_sinks(
    given: Sequence[Given], *, run_dir: Path, settings: Mapping[str, Any], resume_step: int | None
) -> list[Sink]:
    """The sinks that a configuration names. Raises ConfigError where one is none."""
    return [load_part(one, SINK).make(run_dir, settings=settings, resume_step=resume_step) for one in given]


def custom_rules(given: Sequence[Given]) -> dict[str, Rule]:
    """The rules that a configuration names, by the names of their functions; by the whole name where that is taken.

    What one raises, and what it returns that is no alarm, is a LachesisError that names it.

    Raises:
        ConfigError: one is none.
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
            f"{part.title} returned {said!r}, no lachesis.Alarm of level {', '.join(LEVELS)}",
            remedy="return an Alarm, or None",
        )

    return rule
