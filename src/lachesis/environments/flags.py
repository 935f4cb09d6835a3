"""From the words of a command line, and a YAML file, to settings. ``--env.foo-bar`` is ``--env.foo_bar``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from lachesis.common.errors import ConfigError, nearest
from lachesis.environments.settings import EnvironmentConfig, ServerConfig, Settings, SlurmConfig

_CONFIG = "config"


class EnvironmentOptions(Settings):
    """All that an environment is started with."""

    env: EnvironmentConfig
    openai: ServerConfig
    slurm: SlurmConfig


def parse_options(words: Sequence[str], *, env_class: type[EnvironmentConfig]) -> EnvironmentOptions:
    """The options in a command line; those of a file that ``--config`` names count where a flag does not.

    Args:
        words: as in ``["--env.group-size", "8", "--openai.base_url=http://localhost:9001/v1", "--slurm", "False"]``.
        env_class: the environment's own section ``env``.

    Raises:
        ConfigError: a flag is unknown (the nearest known one is named), given twice with different values, without
            a value, or its value is of the wrong kind.
    """
    known = _flags(env_class)
    given = _read_words(words, known=known)
    if _CONFIG in given:
        given = _read_file(Path(given.pop(_CONFIG)), known=known) | given
    sections: dict[str, Any] = {section: {} for section in EnvironmentOptions.model_fields}
    for name, value in given.items():
        section, _, field = name.partition(".")
        sections[section][field or "enabled"] = value
    try:
        return create_model("Options", __base__=EnvironmentOptions, env=(env_class, ...))(**sections)
    except ValidationError as error:
        fault = error.errors()[0]
        flag, reason = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--{flag} is {fault['input']!r}: {reason}", remedy="correct the value") from error


def describe(env_class: type[EnvironmentConfig]) -> list[tuple[str, str, str]]:
    """Every flag with its default, "" where there is none, and its meaning."""
    rows = []
    for name, field in _flags(env_class).items():
        shown = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        rows.append((f"--{name}", "" if shown in (None, "") else str(shown), field.description or ""))
    return rows


def _flags(env_class: type[EnvironmentConfig]) -> dict[str, FieldInfo]:
    """The fields that flags set, by the flag's name: ``config``, ``env.group_size``, ``slurm``."""
    flags = {_CONFIG: FieldInfo(default=None, description="a YAML file with the sections env, openai and slurm")}
    sections: dict[str, type[Settings]] = {"env": env_class, "openai": ServerConfig, "slurm": SlurmConfig}
    for section, settings in sections.items():
        for name, field in settings.model_fields.items():
            flags[section if (section, name) == ("slurm", "enabled") else f"{section}.{name}"] = field
    return flags


def _read_words(words: Sequence[str], *, known: Collection[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in known:
            raise _unknown(flag, name, known)
        if not equals:
            # A flag alone is a switch that is on.
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "True"
        if name in given and given[name] != value:
            raise ConfigError(f"--{name} is given twice: {given[name]} and {value}", remedy="give it once")
        given[name] = value
    return {name: None if value in ("None", "null") else value for name, value in given.items()}


def _read_file(path: Path, *, known: Collection[str]) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}", remedy="give a YAML file") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no mapping", remedy="write the sections env, openai and slurm")
    given: dict[str, Any] = {}
    for section, content in document.items():
        if section == "slurm" and isinstance(content, bool):
            given[section] = content
            continue
        if section == "openai" and isinstance(content, list):
            content = _one_section(path, content)
        if section not in EnvironmentOptions.model_fields or not isinstance(content, dict):
            raise _unknown(f"{path}: {section}", str(section), list(EnvironmentOptions.model_fields))
        for field, value in content.items():
            name = f"{section}.{str(field).replace('-', '_')}".replace("slurm.enabled", "slurm")
            if name not in known:
                raise _unknown(f"{path}: {name}", name, known)
            given[name] = value
    return given


def _one_section(path: Path, entries: Sequence[Any]) -> Mapping[str, Any]:
    """Several servers, as the original writes them: a list of sections that differ in ``base_url`` only."""
    sections = [dict(entry) for entry in entries if isinstance(entry, dict)]
    urls = [section.pop("base_url", None) for section in sections]
    if not sections or len(sections) < len(entries) or None in urls or any(one != sections[0] for one in sections):
        raise ConfigError(
            f"{path}: the entries of openai are no servers of one kind",
            remedy="give each a base_url, and the same values otherwise",
        )
    return sections[0] | {"base_url": tuple(urls)}


def _unknown(shown: str, name: str, known: Collection[str]) -> ConfigError:
    near = nearest(name, known, cutoff=0.5)
    remedy = f"did you mean {'--' if shown.startswith('-') else ''}{near}?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"unknown flag {shown}", remedy=remedy)
