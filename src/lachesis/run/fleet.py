"""Inference servers that join and leave a run that goes on: what was asked of it is a file in its directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pydantic

from lachesis.common.errors import ConfigError, DataError
from lachesis.common.files import write_atomic
from lachesis.common.http import server_url
from lachesis.common.run_files import run_paths
from lachesis.config.load import load_config
from lachesis.config.schema import HttpEngineConfig, LachesisConfig
from lachesis.engines.addresses import FleetChanges, addresses

_CHANGES = pydantic.TypeAdapter(FleetChanges)


def fleet_members(config: LachesisConfig, *, directory: Path) -> Callable[[], Sequence[str]] | None:
    """Return a function that reads the servers a run is to have; None if they cannot change.

    They do where the run starts them itself, and where trainer and engine share memory. The function raises
    ConfigError and EngineUnreachable as :func:`~lachesis.engines.addresses.addresses`, DataError as :func:`changes`.
    """
    if not isinstance(config.engine, HttpEngineConfig) or _shares_memory(config):
        return None
    return partial(_members, config.engine.urls, directory)


def changes(run_dir: Path) -> FleetChanges:
    """Read what was asked of a run so far. Raises DataError if its file was not written by this package."""
    path = run_paths(run_dir)["fleet"]
    try:
        return _CHANGES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return FleetChanges()
    except (OSError, pydantic.ValidationError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="delete it, and add or drain anew") from error


def add(run_dir: Path, url: str) -> str:
    """Ask a run to take a server into its fleet; the server's address. Raises ConfigError, DataError."""
    url = server_url(url)
    _of_changing_run(run_dir)
    _write(run_dir, changes(run_dir).with_added(url))
    return url


def drain(run_dir: Path, url: str) -> str:
    """Ask a run to part with a server once that has no requests; the server's address.

    Raises:
        ConfigError: the run's servers do not change, or this is none of them, or the last.
        DataError: there is no run.
    """
    url = server_url(url)
    config = _of_changing_run(run_dir)
    before = changes(run_dir)
    members = addresses(config.urls, before)
    if url not in members:
        raise ConfigError(f"{url} is not an engine of {run_dir}", remedy=f"its engines are {', '.join(members)}")
    if members == [url]:
        raise ConfigError(f"{url} is the only engine of {run_dir}", remedy="add another one first")
    _write(run_dir, before.with_drained(url))
    return url


def _members(urls: Sequence[str], run_dir: Path) -> Sequence[str]:
    return addresses(urls, changes(run_dir))


def _write(run_dir: Path, asked: FleetChanges) -> None:
    write_atomic(run_paths(run_dir)["fleet"], _CHANGES.dump_json(asked, indent=1).decode() + "\n")


def _of_changing_run(run_dir: Path) -> HttpEngineConfig:
    path = run_paths(run_dir)["config"]
    if not path.is_file():
        raise DataError(f"{run_dir} holds no run", remedy="give the directory of a run, such as runs/NAME")
    config = load_config(path).config
    engine = config.engine
    if not isinstance(engine, HttpEngineConfig):
        raise ConfigError(
            f"{run_dir} has engine.kind {engine.kind}: the run starts its engines itself, and none can join or leave",
            remedy="start servers with `lachesis serve` and name them in engine.urls, with engine.kind: http",
        )
    if _shares_memory(config):
        raise ConfigError(
            f"{run_dir} trains on the memory of its one engine (bridge.kind {config.bridge.kind})",
            remedy="use a bridge that copies, such as broadcast or lora_only without share_base",
        )
    return engine


def _shares_memory(config: LachesisConfig) -> bool:
    return config.bridge.capabilities.shares_storage or bool(getattr(config.bridge, "share_base", False))
