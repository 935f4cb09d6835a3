"""Small groups, as tests of the metrics have them."""

from tests.unit.metrics.conftest import make_group

__all__ = ["make_group"]
