"""The schema as a table of sections and keys with type, default and description, and hints for misspelled keys."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lachesis.common.errors import nearest
from lachesis.common.json_values import is_object
from lachesis.config.schema import LachesisConfig
from lachesis.config.schema.engines import HOST
from lachesis.config.schema.rollouts import SOURCE_NAME
from lachesis.plugins.export.section import REPOSITORY

# Descriptions of text types by their regular expressions.
_FORMS = {HOST: "name or address of a host", REPOSITORY: "name of a repository", SOURCE_NAME: "name"}
_SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}
_ANYWHERE_CUTOFF = 0.75


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration tree; ``default`` is None if the key is required.

    ``kinds`` names the variants of a tagged section that have the key; empty if all of them do.
    """

    path: str
    section: str
    name: str
    type: str
    default: str | None
    description: str
    choices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """A section of the configuration tree; the root has the path ``""``.

    For a tagged section, ``kinds`` are the possible values of its ``kind``, and ``default_kind`` is the default.
    ``discriminated`` is True if there are several kinds to choose from.
    """

    path: str
    description: str
    required: bool
    keys: tuple[Key, ...]
    subsections: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    default_kind: str | None = None

    @property
    def discriminated(self) -> bool:
        return len(self.kinds) > 1


@cache
def all_sections(root: type[BaseModel] = LachesisConfig) -> tuple[SectionInfo, ...]:
    """Return every section in schema order: the root first, nested sections after their parents."""
    return tuple(_walk(path="", models=[root], field=None))


@cache
def all_keys(root: type[BaseModel] = LachesisConfig) -> tuple[Key, ...]:
    """Return every key in the order of the schema."""
    return tuple(key for section in all_sections(root) for key in section.keys)


def find_section(path: str, root: type[BaseModel] = LachesisConfig) -> SectionInfo | None:
    """Return the section at a dotted path, or None."""
    return next((section for section in all_sections(root) if section.path == path), None)


def find_keys(path: str, root: type[BaseModel] = LachesisConfig) -> tuple[Key, ...]:
    """Return the keys at a dotted path: several if variants of a section give the key different meanings."""
    return tuple(key for key in all_keys(root) if key.path == path)


def join(section: str, name: str) -> str:
    """Return the dotted path of a name in a section."""
    return f"{section}.{name}" if section else name


def type_in_words(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    """Describe a type annotation for users: ``whole number >= 1``, ``list of text``.

    Raises:
        TypeError: the type is not supported.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_in_words(arguments[0], [*constraints, *_flat(arguments[1:])])
    if origin in (Union, types.UnionType):
        return " or ".join(type_in_words(argument, constraints) for argument in arguments)
    if origin is Literal:
        return ", ".join(map(str, arguments)) if len(arguments) == 1 else f"one of {', '.join(arguments)}"
    if sections := _section_models(annotation):
        return f"mapping with {', '.join(sections[0].model_fields)}"
    if origin is list:
        empty = any(getattr(constraint, "min_length", None) for constraint in constraints)
        return f"{'non-empty ' if empty else ''}list of {_plural(type_in_words(arguments[0]))}"
    if origin is tuple:
        items = list(dict.fromkeys(type_in_words(argument) for argument in arguments))
        each = f"each {items[0]}" if len(items) == 1 else ", ".join(items)
        return f"list of {len(arguments)}, {each}"
    if origin is dict:
        return "mapping"
    if annotation not in _SCALARS:
        raise TypeError(f"no description for the type {annotation!r}")
    form = next((found for constraint in constraints if (found := getattr(constraint, "pattern", None))), None)
    if annotation is str and form is not None:
        return _FORMS[form]
    bounds = _bounds(constraints) if annotation in (int, float) else ""
    return f"{_SCALARS[annotation]} {bounds}".strip()


def value_in_words(value: Any) -> str:
    """Return a value as one line of YAML; ``unset`` for None."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def paths_named(name: str, root: type[BaseModel] = LachesisConfig) -> list[str]:
    """Return the dotted paths of all keys and sections whose last part is ``name``."""
    paths = [section.path for section in all_sections(root)] + [key.path for key in all_keys(root)]
    return list(dict.fromkeys(path for path in paths if path.rpartition(".")[2] == name and path))


def nearest_path(word: str, root: type[BaseModel] = LachesisConfig) -> str | None:
    """Return the path in the tree most similar to ``word``, by full path or last part; None if none is close."""
    paths = [path for section in all_sections(root) if (path := section.path)]
    paths += [key.path for key in all_keys(root)]
    by_name = {path.rpartition(".")[2]: path for path in reversed(paths)}
    match = nearest(word, [*paths, *by_name], cutoff=_ANYWHERE_CUTOFF)
    return by_name.get(match, match) if match else None


def unknown_key_hint(
    *, section: str, name: str, kind: str | None = None, root: type[BaseModel] = LachesisConfig
) -> str:
    """Return a hint for the unknown key ``name`` in ``section``; ``kind`` is the section's variant."""
    info = find_section(section, root)
    if info is None:
        return f"{section} has no keys"
    parent, dot, last = join(section, name).rpartition(".")
    if dot and "." in name and find_keys(f"{parent}.{last}", root):
        return f"write {last} on a line below {parent.rpartition('.')[2]}:, indented"
    other_kinds = [kind for key in info.keys if key.name == name for kind in key.kinds]
    if other_kinds:
        return f"it belongs to {section}.kind: {' or '.join(other_kinds)}, but kind is {kind}"
    if elsewhere := paths_named(name, root):
        return f"it belongs to {' or '.join(elsewhere)}"
    names = [key.name for key in info.keys if not key.kinds or kind is None or kind in key.kinds]
    names += info.subsections
    if sibling := nearest(name, names):
        return f"did you mean {join(section, sibling)}?"
    if path := nearest_path(name, root):
        return f"did you mean {path}?"
    return f"{section or 'the configuration'} has {', '.join(names)}"


def _walk(*, path: str, models: Sequence[type[BaseModel]], field: FieldInfo | None) -> Iterator[SectionInfo]:
    """Yield the section at ``path``, whose variants are ``models``, and all sections below it."""
    kinds = tuple(kind for model in models if (kind := _kind_of(model)))
    nested = {
        name: (child_models, child)
        for model in models
        for name, child in model.model_fields.items()
        if (child_models := _section_models(child.annotation))
    }
    yield SectionInfo(
        path=path,
        description=_description(models),
        required=field is not None and field.is_required(),
        keys=tuple(_merge(path=path, models=models, field=field, kinds=kinds)),
        subsections=tuple(nested),
        kinds=kinds,
        default_kind=_default_kind(field, kinds),
    )
    for name, (child_models, child) in nested.items():
        yield from _walk(path=join(path, name), models=child_models, field=child)


def _merge(
    *, path: str, models: Sequence[type[BaseModel]], field: FieldInfo | None, kinds: tuple[str, ...]
) -> Iterator[Key]:
    """Yield the keys of all variants; a shared key appears once."""
    if kinds:
        yield Key(
            path=join(path, "kind"),
            section=path,
            name="kind",
            type=type_in_words(Literal[kinds]),  # type: ignore[valid-type]
            default=_default_kind(field, kinds),
            description=_description(models) if len(models) > 1 else "The only kind there is.",
            choices=kinds,
        )
    found: dict[Key, list[str]] = {}
    for model in models:
        for name, child in model.model_fields.items():
            if (name == "kind" and kinds) or _section_models(child.annotation):
                continue
            found.setdefault(_key(path, name, child), []).append(_kind_of(model) or "")
    for key, having in found.items():
        limited = tuple(having) if len(having) < len(models) else ()
        yield replace(key, kinds=limited)


def _key(path: str, name: str, field: FieldInfo) -> Key:
    default = None if field.is_required() else value_in_words(field.get_default(call_default_factory=True))
    return Key(
        path=join(path, name),
        section=path,
        name=name,
        type=type_in_words(field.annotation, _flat(field.metadata)),
        default=default,
        description=field.description or "",
        choices=tuple(str(choice) for choice in _choices(field.annotation)),
    )


def _kind_of(model: type[BaseModel]) -> str | None:
    """Return the tag of a variant: the only value its ``kind`` may have."""
    field = model.model_fields.get("kind")
    choices = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
    return choices[0] if len(choices) == 1 else None


def _default_kind(field: FieldInfo | None, kinds: tuple[str, ...]) -> str | None:
    if not kinds or field is None or field.is_required():
        return None
    default = field.get_default(call_default_factory=True)
    return getattr(default, "kind", None)


def _description(models: Sequence[type[BaseModel]]) -> str:
    """Return the docstring of a section; for several variants, each docstring after its kind."""
    texts = [" ".join(inspect.cleandoc(model.__doc__ or "").split()) for model in models]
    if len(models) == 1:
        return texts[0]
    return " ".join(f"`{_kind_of(model)}`: {text}" for model, text in zip(models, texts, strict=True))


def without_nulls(data: Any, models: Sequence[type[BaseModel]]) -> Any:
    """Return a document without nulls for keys that cannot be null, or that are null by default.

    Args:
        data: the data of a section described by ``models``; anything but a mapping is returned unchanged.
    """
    if not is_object(data):
        return data
    kept: dict[str, Any] = {}
    for name, value in data.items():
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if (
            value is None
            and fields
            and not any(f.default is not None and type(None) in _branches(f.annotation) for f in fields)
        ):
            continue
        # Most values are not sections, and finding out which models a field takes is comparatively slow.
        inner = [model for field in fields for model in _section_models(field.annotation)] if is_object(value) else []
        kept[name] = without_nulls(value, inner) if inner else value
    return kept


def _section_models(annotation: Any) -> list[type[BaseModel]]:
    return [part for part in _branches(annotation) if inspect.isclass(part) and issubclass(part, BaseModel)]


def _choices(annotation: Any) -> list[Any]:
    return [choice for part in _branches(annotation) if get_origin(part) is Literal for choice in get_args(part)]


def _branches(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union; for any other type, yield the type itself."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _branches(argument)
    else:
        yield annotation


def _flat(metadata: Iterable[Any]) -> list[Any]:
    """Return the constraints, including any wrapped in the Field of an Annotated alias."""
    flat: list[Any] = []
    for item in metadata:
        flat += item.metadata if isinstance(item, FieldInfo) else [item]
    return flat


def _bounds(constraints: Sequence[Any]) -> str:
    limits = {
        symbol: getattr(constraint, name)
        for constraint in constraints
        for name, symbol in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(constraint, name, None) is not None
    }
    if set(limits) == {">=", "<="}:
        return f"from {limits['>=']:g} to {limits['<=']:g}"
    return " and ".join(f"{symbol} {limit:g}" for symbol, limit in limits.items())


def _plural(words: str) -> str:
    for singular in ("whole number", "number", "mapping"):
        if words.startswith(singular):
            return words.replace(singular, f"{singular}s", 1)
    return words
