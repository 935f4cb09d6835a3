"""Clients of the server: their keys and limits, from a file with a table for each."""

from __future__ import annotations

import hmac
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.common.errors import ConfigError


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key_variable: str = Field(min_length=1)
    max_runs: int | None = Field(default=None, ge=1)
    max_lora_rank: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Holder of a key.

    Args:
        name: from the file; empty where the server has a single key or none.
        max_runs: most runs at the same time; ``None`` for no limit.
        max_lora_rank: largest rank of an adapter; ``None`` for the server's.
    """

    name: str = ""
    max_runs: int | None = None
    max_lora_rank: int | None = None


class Clients:
    """Clients that the server accepts, by their keys.

    Args:
        by_key: clients by key; an empty key admits everybody.
    """

    def __init__(self, by_key: Mapping[str, Client]) -> None:
        self._by_key = dict(by_key)

    @classmethod
    def single(cls, key: str | None) -> Clients:
        """Return the one client of a server with one key, or with none."""
        return cls({key or "": Client()})

    @classmethod
    def read(cls, file: Path) -> Clients:
        """Read a TOML file with a table ``[NAME]`` for each client.

        Raises:
            ConfigError: the file cannot be read, names a variable that is not set, or gives two clients one key.
        """
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
            rows = {name: _Row.model_validate(table) for name, table in tables.items()}
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"--clients {file} cannot be read: {error}", remedy="write [NAME] tables") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "a client"
            remedy = "each table has key_variable, and may have max_runs and max_lora_rank"
            raise ConfigError(f"--clients {file}: {where}: {first['msg']}", remedy=remedy) from error
        found: dict[str, Client] = {}
        for name, row in rows.items():
            key = os.environ.get(row.key_variable, "")
            if not key:
                raise ConfigError(
                    f"--clients {file}: the variable {row.key_variable} for the key of {name} is not set",
                    remedy="set it before you start the server",
                )
            if key in found:
                raise ConfigError(
                    f"--clients {file}: {found[key].name} and {name} have the same key", remedy="give each its own"
                )
            found[key] = Client(name=name, max_runs=row.max_runs, max_lora_rank=row.max_lora_rank)
        if not found:
            raise ConfigError(f"--clients {file} has no clients", remedy="write a table [NAME] for each client")
        return cls(found)

    def of(self, key: str) -> Client | None:
        """Return the client with a key; ``None`` if no client has it."""
        if "" in self._by_key:
            return self._by_key[""]
        given = key.encode()
        matches = [client for own, client in self._by_key.items() if hmac.compare_digest(given, own.encode())]
        return matches[0] if matches else None
