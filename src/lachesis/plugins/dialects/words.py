"""The tables of ``names/``, and the other trainers' words in them: only data, checked when it is read."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

NAMES = Path(__file__).parent / "names"


@cache
def read_table(file: str) -> dict[str, Any]:
    """Return the content of ``names/FILE.toml``, which must not be changed."""
    return tomllib.loads((NAMES / f"{file}.toml").read_text(encoding="utf-8"))


class Words(BaseModel):
    """Record of ``[words]`` in a table: a subclass names each of its parts with a type. Other parts are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, file: str) -> Self:
        """Return the words of ``names/FILE.toml``."""
        return cls.model_validate(read_table(file)["words"])
