"""A configuration on a tiny model, as tests of runs have it."""

from tests.unit.run.conftest import config

__all__ = ["config"]
