"""Products beside the core, and ``table.toml``, the one table of what the core loads of them by name.

A row is imported when a configuration names it. Commands are rows of :data:`lachesis.cli.commands.COMMANDS`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

TABLE: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("table.toml").read_text(encoding="utf-8")
)


def load(group: str, name: str) -> Any:
    """Import what ``name`` stands for in a group of :data:`TABLE`; raise KeyError if there is no such row."""
    module, _, attribute = TABLE[group][name].partition(":")
    return getattr(import_module(f"lachesis.plugins.{module}"), attribute)
