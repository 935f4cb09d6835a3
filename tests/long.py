"""Tests that only `make test-all` runs: `make test` runs a shorter one of the same kind, which the mark names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(values: Iterable[Any], *, short: Collection[Any], why: str) -> list[Any]:
    """Values of a parameter, of which `make test` runs those of ``short``; ``why`` as in the mark `long`."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.long(why)) for value in values]
