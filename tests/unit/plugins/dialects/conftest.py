"""A configuration file, as tests of the configuration write it."""

from tests.unit.config.conftest import write

__all__ = ["write"]
