"""From the words of a command line, and a YAML file, to settings. ``--env.foo-bar`` is ``--env.foo_bar``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lachesis.common.errors import ConfigError, nearest
from lachesis.environments.settings import EnvironmentConfig, ServerConfig, Settings, SlurmConfig

_SECTIONS = ("env", "openai", "slurm")
_CONFIG = "config"


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
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
    classes: dict[str, type[Settings]] = {"env": env_class, "openai": ServerConfig, "slurm": SlurmConfig}
    given = _read_words(words, known=_known(classes))
    sections = _read_file(Path(given.pop(_CONFIG)), classes) if _CONFIG in given else {}
    for name, value in given.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field or "enabled"] = value
    built = {section: _build(classes[section], section, sections.get(section, {})) for section in _SECTIONS}
    return EnvironmentOptions(**built)  # type: ignore[arg-type]


def describe(env_class: type[EnvironmentConfig]) -> list[tuple[str, str, str]]:
    """Every flag with its default, "" where there is none, and its meaning."""
    rows = [(f"--{_CONFIG}", "", "a YAML file with the sections env, openai and slurm")]
    for section, settings in (("env", env_class), ("openai", ServerConfig), ("slurm", SlurmConfig)):
        for name, field in settings.model_fields.items():
            flag = f"--{section}" if (section, name) == ("slurm", "enabled") else f"--{section}.{name}"
            shown = ",".join(field.default) if isinstance(field.default, tuple) else field.default
            rows.append((flag, "" if shown in (None, "") else str(shown), field.description or ""))
    return rows


def _known(classes: Mapping[str, type[Settings]]) -> list[str]:
    names = [f"{section}.{field}" for section, settings in classes.items() for field in settings.model_fields]
    return [_CONFIG, *("slurm" if name == "slurm.enabled" else name for name in names)]


def _read_words(words: Sequence[str], *, known: Iterable[str]) -> dict[str, Any]:
    known = list(known)
    given: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
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


def _read_file(path: Path, classes: Mapping[str, type[Settings]]) -> dict[str, dict[str, Any]]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}", remedy="give a YAML file") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no mapping", remedy="write the sections env, openai and slurm")
    known = _known(classes)
    sections: dict[str, dict[str, Any]] = {}
    for section, content in document.items():
        if section == "slurm" and isinstance(content, bool):
            content = {"enabled": content}
        if section == "openai" and isinstance(content, list):
            content = _one_section(path, content)
        if section not in classes or not isinstance(content, dict):
            raise _unknown(f"{path}: {section}", str(section), list(classes))
        fields = {str(name).replace("-", "_"): value for name, value in content.items()}
        for name in fields:
            if name not in classes[section].model_fields:
                raise _unknown(f"{path}: {section}.{name}", f"{section}.{name}", known)
        sections[section] = fields
    return sections


def _one_section(path: Path, entries: Sequence[Any]) -> dict[str, Any]:
    """Several servers, as the original writes them: a list of sections that differ in ``base_url`` only."""
    sections = [dict(entry) for entry in entries if isinstance(entry, dict)]
    urls = [section.pop("base_url", None) for section in sections]
    if not sections or len(sections) < len(entries) or None in urls or any(one != sections[0] for one in sections):
        raise ConfigError(
            f"{path}: the entries of openai are no servers of one kind",
            remedy="give each a base_url, and the same values otherwise",
        )
    return sections[0] | {"base_url": tuple(urls)}


def _build(settings: type[Settings], section: str, values: Mapping[str, Any]) -> Settings:
    try:
        return settings(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        flag = f"--{section}." + ".".join(map(str, fault["loc"]))
        reason = fault["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{flag} is {fault['input']!r}: {reason}", remedy="correct the value") from error


def _unknown(shown: str, name: str, known: Sequence[str]) -> ConfigError:
    near = nearest(name, known, cutoff=0.5)
    remedy = f"did you mean {'--' if shown.startswith('-') else ''}{near}?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"unknown flag {shown}", remedy=remedy)
