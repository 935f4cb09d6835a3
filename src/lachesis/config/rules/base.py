"""What rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lachesis.common.types import Finding
from lachesis.config.schema import LachesisConfig

Rule = Callable[[LachesisConfig], Iterator[Finding]]


def problem(rule: str, message: str) -> Finding:
    """A combination that cannot work, or does nothing that was asked for."""
    return Finding(level="problem", rule=rule, message=message)


def warning(rule: str, message: str) -> Finding:
    """One that works otherwise than most would expect."""
    return Finding(level="warning", rule=rule, message=message)


def note(rule: str, message: str) -> Finding:
    """A fact worth knowing."""
    return Finding(level="note", rule=rule, message=message)


def changed(config: LachesisConfig, section: str, *names: str) -> list[str]:
    """Those keys of a section that are not at their defaults, as dotted paths."""
    part = getattr(config, section)
    fields = type(part).model_fields
    return [
        f"{section}.{name}"
        for name in names
        if getattr(part, name) != fields[name].get_default(call_default_factory=True)
    ]
