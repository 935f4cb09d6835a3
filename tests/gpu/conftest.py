"""What the suites over servers have, for those on GPUs."""

from tests.contracts.conftest import session_environment
from tests.contracts.test_bridge_contract import environment

__all__ = ["environment", "session_environment"]
