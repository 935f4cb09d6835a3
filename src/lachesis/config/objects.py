"""Configurations from Python: the same keys as in YAML, where values may also be functions and datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lachesis.common.errors import ConfigError
from lachesis.common.objects import NamedObject, NamedObjects
from lachesis.common.run_files import run_paths
from lachesis.config.custom import BY_SHORT, Kind
from lachesis.config.document import FROM_PYTHON, Document, Place, dotted
from lachesis.config.load import LoadedConfig, dialect_of, lay_over, load_document, read_file
from lachesis.config.schema import LachesisConfig

# Sections that may be replaced by the value of one key: section name to key name.
_SHORT = {"model": "path", "data": "path", "rewards": "functions"}
_DATASETS = {"path", "eval_path"}

RewardArgument = str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GivenConfig:
    """A configuration and the objects that it names, which stay registered as long as ``given`` is kept."""

    loaded: LoadedConfig
    given: tuple[NamedObject, ...]


def load_objects(
    config: str | Path | Mapping[str, Any] | None, keys: Mapping[str, Any], *, complete: bool = True
) -> GivenConfig:
    """Read a configuration from a file or a mapping, merge ``keys`` over it, and validate the result.

    Args:
        config: a file or script in any dialect, the directory of a run (its config.yaml), or a mapping of these keys;
            ``None`` if ``keys`` has everything. Paths in a file are relative to it, others to the current directory.
        keys: sections of the canonical tree, or ``"section.key"``. ``model`` and ``data`` may be the path alone,
            ``rewards`` the functions alone, and custom parts (:mod:`lachesis.config.custom`) go by their short names.
            An object may replace a path to data or the name of a function. If ``config`` is in another trainer's
            dialect, ``keys`` may be too.
        complete: require all keys that a run needs.

    Raises:
        ConfigError: as for :func:`lachesis.config.load.load_config`, or a value is an object that its key cannot take.
    """
    giving = NamedObjects()
    document, base_dir = _document(config, giving)
    if document.older:
        dialect_of(document)  # before keys replace what it reads otherwise
    laid = _plain_keys(keys, document, giving)
    # A name that is no section of ours, beside more that are, is no key of another trainer.
    alone = config is None and dialect_of(Document(FROM_PYTHON, dict(laid))) == "canonical"
    ours = {name: value for name, value in laid.items() if alone or name in LachesisConfig.model_fields}
    lay_over(document.data, {name: value for name, value in laid.items() if name not in ours})
    if not complete:
        ours.setdefault("run", {})  # everything in the section has a default except the length
    if not document.data:
        document.data = ours
    return GivenConfig(load_document(document, base_dir=base_dir, keys=ours, complete=complete), tuple(giving.kept))


def _document(config: str | Path | Mapping[str, Any] | None, giving: NamedObjects) -> tuple[Document, Path]:
    if config is None:
        return Document(FROM_PYTHON, {}), Path.cwd()
    if isinstance(config, Mapping):
        document = Document(FROM_PYTHON, {})
        document.data = _plain_keys(config, document, giving)
        return document, Path.cwd()
    path = Path(config)
    if path.is_dir():
        path = run_paths(path)["config"]
    return read_file(path), path.absolute().parent


def _plain_keys(keys: Mapping[str, Any], document: Document, giving: NamedObjects) -> dict[str, Any]:
    """Return the keys as plain data, with objects replaced by names; report unsupported values as document problems."""
    data: dict[str, Any] = {}
    for name, value in keys.items():
        if name in BY_SHORT and not isinstance(value, Mapping) and "." not in name:
            lay_over(data, _short_part(BY_SHORT[name], value, document, giving))
            continue
        parts = tuple(name.split("."))
        if len(parts) == 1 and name in _SHORT and not isinstance(value, Mapping):
            parts = (name, _SHORT[name])
            value = _listed(value) if name == "rewards" else value
        plain: Any = _plain(value, parts, document, giving)
        for part in reversed(parts):
            plain = {part: plain}
        lay_over(data, plain)
    return data


def _short_part(kind: Kind, value: Any, document: Document, giving: NamedObjects) -> dict[str, Any]:
    """Return the section for a part that was given under its short name."""
    section, _, name = kind.key.partition(".")
    plain = _plain(_listed(value) if kind.several else value, (section, name), document, giving)
    return {section: dict(kind.needs) | {name: plain}}


def _listed(value: Any) -> Any:
    return cast(Any, value) if isinstance(value, list | tuple) else [value]


def _plain(value: Any, place: Place, document: Document, giving: NamedObjects) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if place[0] in ("data", "datasets") and place[-1] in _DATASETS:
        return giving.give("data" if place[-1] == "path" else "eval_data", value)
    if isinstance(value, Mapping):
        entries = cast(Mapping[object, Any], value)
        return {str(key): _plain(item, (*place, str(key)), document, giving) for key, item in entries.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        items = cast("list[Any]", list(value))  # pyright: ignore[reportUnknownArgumentType]
        return [_plain(item, (*place, index), document, giving) for index, item in enumerate(items)]
    if callable(value):
        return giving.give(str(getattr(value, "__name__", type(value).__name__)), value)
    if getattr(value, "ndim", None) == 0:  # a numpy or torch scalar
        return value.item()
    document.problems.append(
        f"{dotted(place)}: an object of type {type(value).__name__} is not accepted there; give plain values (numbers, "
        "strings, lists, mappings), or a function if the argument takes one"
    )
    return None


def require_steps(config: LachesisConfig) -> LachesisConfig:
    """Return the configuration with a number of steps, for users who write their own training loop.

    Raises:
        ConfigError: the learning-rate schedule depends on the number of steps, which is not set.
    """
    run, optimizer = config.run, config.optimizer
    if run.steps is not None:
        return config
    if optimizer.schedule != "constant" or optimizer.warmup_ratio:
        raise ConfigError(
            f"optimizer.schedule is {optimizer.schedule}, which needs the number of steps",
            remedy='pass run={"steps": ...}, or set optimizer.schedule: constant without a warmup_ratio',
        )
    return config.model_copy(update={"run": run.model_copy(update={"steps": max(1, optimizer.warmup_steps)})})
