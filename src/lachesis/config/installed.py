"""Kinds of ``source`` and ``engine`` that installed packages add to the schema, each with its own section.

An entry point of ``lachesis.sources`` or ``lachesis.engines`` has the name of the kind and names its section: a model
whose ``builds`` says what makes the part. A document that names such a kind is checked by a schema with that section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import isclass
from typing import Annotated, Any, Union, get_args

from pydantic import Field, create_model

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_object
from lachesis.config.schema import LachesisConfig
from lachesis.config.section import BaseEngineConfig, EpisodesSourceConfig, Section

# The base classes that sections of installed packages must derive from, by the name of the tagged section.
BASES: Mapping[str, type[Section]] = {"source": EpisodesSourceConfig, "engine": BaseEngineConfig}


def schema_of(data: Mapping[str, Any]) -> type[LachesisConfig]:
    """Return the schema for a document: :class:`LachesisConfig` plus the installed sections that the document names.

    Raises:
        ConfigError: an entry point cannot be imported, or does not refer to a section of that kind.
    """
    found = tuple(_named(data))
    return _joined(found) if found else LachesisConfig


def _named(data: Mapping[str, Any]) -> Iterator[tuple[str, type[Section]]]:
    """Yield the installed sections whose kinds a document names; if a kind is unknown, yield all installed ones."""
    for name, base in BASES.items():
        section = data.get(name)
        kind = section.get("kind") if is_object(section) else None
        if not isinstance(kind, str) or kind in _kinds(name):
            continue
        from lachesis.common.imports import entry_point_names  # only needed if a document names an installed kind

        installed = entry_point_names(f"lachesis.{name}")
        for one in [kind] if kind in installed else installed:
            if (model := _section(name, one)) is not None:
                yield name, model
            elif one == kind:
                raise ConfigError(
                    f"{name}.kind {kind}: the entry point of lachesis.{name} names something other than its section",
                    remedy=f"have it name a class derived from {base.__module__}.{base.__name__}, with `kind: "
                    f"Literal[{kind!r}] = {kind!r}` and `builds = 'module.NAME'`; see docs/extending.md",
                )


def _kinds(name: str) -> set[str]:
    """Return the built-in kinds of a section."""
    models = get_args(LachesisConfig.model_fields[name].annotation)
    return {model.model_fields["kind"].default for model in models}


@cache
def _section(name: str, kind: str) -> type[Section] | None:
    """Return the section that an entry point refers to, or None if it is not a section. Raises as :func:`schema_of`."""
    from lachesis.common.imports import load_function

    found = load_function(kind, group=f"lachesis.{name}")
    if not (isclass(found) and issubclass(found, BASES[name]) and found.builds):
        return None
    field = found.model_fields.get("kind")
    return found if field is not None and get_args(field.annotation) == (kind,) else None


@cache
def _joined(sections: tuple[tuple[str, type[Section]], ...]) -> type[LachesisConfig]:
    """Return the schema with these further kinds added to its tagged sections."""
    fields: dict[str, Any] = {}
    for name in dict(sections):
        field, own = LachesisConfig.model_fields[name], [model for of, model in sections if of == name]
        union = Annotated[Union[field.annotation, *own], Field(discriminator="kind")]
        fields[name] = (union, field.get_default(call_default_factory=True))
    return create_model("LachesisConfig", __base__=LachesisConfig, **fields)
