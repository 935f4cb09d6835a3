"""The building blocks of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from lachesis.common.types import Finding, Level
from lachesis.config.schema import LachesisConfig, Section

Said = tuple[Level, str]
"""A level and a message."""

Rule = Callable[[LachesisConfig], Iterator[Said]]
"""A check; its function's name is the name of its findings."""


def problem(message: str) -> Said:
    """Return a problem: a combination that cannot work, or does not have the requested effect."""
    return "problem", message


def warning(message: str) -> Said:
    """Return a warning: a combination that works differently from what most would expect."""
    return "warning", message


def note(message: str) -> Said:
    """Return a note: a fact worth knowing."""
    return "note", message


def found_by(rules: Iterable[Rule], config: LachesisConfig) -> Iterator[Finding]:
    """Yield the rules' findings about a configuration, each under its rule's name."""
    for rule in rules:
        for level, message in rule(config):
            yield Finding(level=level, rule=rule.__name__.removeprefix("_"), message=message)


def changed(config: LachesisConfig, section: str, *names: str) -> list[str]:
    """Return the dotted paths of the keys of a section that differ from their defaults."""
    part: Section = getattr(config, section)
    defaults = {name: field.get_default(call_default_factory=True) for name, field in type(part).model_fields.items()}
    return [f"{section}.{name}" for name in names if getattr(part, name) != defaults[name]]
