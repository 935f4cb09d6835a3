"""The smallest valid configuration, as tests of the configuration have it."""

from tests.unit.config.conftest import build

__all__ = ["build"]
