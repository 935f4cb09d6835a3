"""Reading a configuration: YAML and overrides in, an immutable, resolved tree or one clear error out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lachesis.config.document import Document, apply_overrides, read_document, to_yaml
from lachesis.config.keys import all_sections
from lachesis.config.paths import resolve_all, resolve_path
from lachesis.config.problems import config_error, schema_problems
from lachesis.config.schema import LachesisConfig

__all__ = ["LoadedConfig", "dump_config", "load_config", "resolve_path", "validate"]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration whose paths are absolute, and the directory of the file that it came from."""

    config: LachesisConfig
    base_dir: Path


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a YAML file, apply ``a.b=c`` overrides in order, validate, and make paths absolute.

    Paths are resolved as :mod:`lachesis.config.paths` says. Nothing but the configuration file is read.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; the message lists every problem
            with its key and line.
    """
    path = Path(path)
    document = read_document(path)
    apply_overrides(document, overrides)
    base_dir = path.absolute().parent
    config = resolve_all(validate(document), base_dir=base_dir, cwd=Path.cwd())
    return LoadedConfig(config=config, base_dir=base_dir)


def dump_config(config: LachesisConfig) -> str:
    """The whole tree, defaults included, as YAML that loads back equal."""
    return to_yaml(config.model_dump(mode="python"))


def validate(document: Document) -> LachesisConfig:
    """Check a document against the schema, strictly: text is no number, a number is no text.

    Raises:
        ConfigError: with everything that is wrong, a line each.
    """
    problems = list(document.problems)
    # Through JSON, because only there strict validation takes a list for a tuple.
    text = json.dumps(_with_default_kinds(document.data))
    try:
        config = LachesisConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise config_error(document.name, problems + schema_problems(error, document)) from error
    if problems:
        raise config_error(document.name, problems)
    return config


def _with_default_kinds(data: dict[str, Any]) -> dict[str, Any]:
    """Tagged sections that do not say their kind get the default one, as any other key does."""
    for section in all_sections():
        if not section.discriminated or section.default_kind is None:
            continue
        *parents, name = section.path.split(".")
        data = _updated(data, parents=parents, name=name, kind=section.default_kind)
    return data


def _updated(data: dict[str, Any], *, parents: Sequence[str], name: str, kind: str) -> dict[str, Any]:
    if parents:
        child = data.get(parents[0])
        if not isinstance(child, dict):
            return data
        return {**data, parents[0]: _updated(child, parents=parents[1:], name=name, kind=kind)}
    child = data.get(name)
    return {**data, name: {"kind": kind, **child}} if isinstance(child, dict) else data
