"""What rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lachesis.common.types import Level
from lachesis.config.schema import LachesisConfig, Section

Said = tuple[Level, str]
"""How bad it is, and what it is."""

Rule = Callable[[LachesisConfig], Iterator[Said]]
"""A check; what it says goes by the name of its function."""


def problem(message: str) -> Said:
    """A combination that cannot work, or does nothing that was asked for."""
    return "problem", message


def warning(message: str) -> Said:
    """One that works otherwise than most would expect."""
    return "warning", message


def note(message: str) -> Said:
    """A fact worth knowing."""
    return "note", message


def changed(config: LachesisConfig, section: str, *names: str) -> list[str]:
    """Those keys of a section that are not at their defaults, as dotted paths."""
    part: Section = getattr(config, section)
    defaults = {name: field.get_default(call_default_factory=True) for name, field in type(part).model_fields.items()}
    return [f"{section}.{name}" for name in names if getattr(part, name) != defaults[name]]
