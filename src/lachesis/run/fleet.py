"""Inference servers that join and leave a run that goes on: what was asked of it is a file in its directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pydantic

from lachesis.common.errors import DataError
from lachesis.common.run_files import run_paths
from lachesis.config.schema import HttpEngineConfig, LachesisConfig
from lachesis.engines.addresses import FleetChanges, addresses

CHANGES = pydantic.TypeAdapter(FleetChanges)


def fleet_members(config: LachesisConfig, *, directory: Path) -> Callable[[], Sequence[str]] | None:
    """Return a function that reads the servers a run is to have; None if they cannot change.

    The servers cannot change if the run starts them itself, or if trainer and engine share memory. The function raises
    ConfigError and EngineUnreachable as :func:`~lachesis.engines.addresses.addresses`, DataError as :func:`changes`.
    """
    if not isinstance(config.engine, HttpEngineConfig) or shares_memory(config):
        return None
    return partial(_members, config.engine.urls, directory)


def changes(run_dir: Path) -> FleetChanges:
    """Read what was asked of a run so far. Raises DataError if its file was not written by this package."""
    path = run_paths(run_dir)["fleet"]
    try:
        return CHANGES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return FleetChanges()
    except (OSError, pydantic.ValidationError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="delete it, and add or drain anew") from error


def _members(urls: Sequence[str], run_dir: Path) -> Sequence[str]:
    return addresses(urls, changes(run_dir))


def shares_memory(config: LachesisConfig) -> bool:
    """Return True if trainer and engine share memory."""
    return config.bridge.capabilities.shares_storage or bool(getattr(config.bridge, "share_base", False))
