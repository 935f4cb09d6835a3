"""A process that closes its weight channels and ends: what its library still has to end does not abort it."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.runs import environment
from tests.waiting import LONG_S

# The end of a gloo group joins its threads, in C++. Were the interpreter gone by then, the process would be aborted.
PROGRAM = """
from tests.unit.transport.test_channel import pair

channels = [channel for _ in range(4) for channel in pair()]
for channel in channels:
    channel.close()
"""


def test_channels_that_are_closed_last_of_all_abort_nothing():
    words = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
