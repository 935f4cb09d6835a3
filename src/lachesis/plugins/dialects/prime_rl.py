"""prime-rl's TOML files: recognized, and refused with what is the same here, for the rest has another form."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import flat
from lachesis.plugins.dialects.words import read_table

_TABLES = read_table("prime_rl")


def refuse_toml(path: Path) -> ConfigError:
    """Return the error for a TOML file: what it says that is the same here, and what has another form.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a TOML file") from error
    names = dict(flat(data))
    same = [f"{ours}: {names[name]}" for name, ours in _TABLES["same"].items() if name in names]
    sections = ("orchestrator", "trainer", "inference", "optim", "env", "loss", "weight_broadcast")
    if not any(name.partition(".")[0] in sections for name in names):
        return ConfigError(f"{path} is TOML of no trainer that Lachesis knows", remedy="write YAML in Lachesis' keys")
    other = [f"{name}: {why}" for name, why in _TABLES["otherwise"].items() if name in names or any(
        one.startswith(f"{name}.") for one in names)]  # fmt: skip
    return ConfigError(
        "\n".join([f"{path} is a configuration of prime-rl, whose loss and environments have another form", *other]),
        remedy=f"write a configuration of Lachesis' keys; the same here are {', '.join(same) or 'none of them'}",
    )
