"""2,000 episodes under way at the same time, in a process of their own whose memory is read when it ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.runs import environment
from tests.long import long_but
from tests.many_episodes import KINDS

NUMBER, MOST_GIGABYTES = 2_000, 2.0


@pytest.mark.parametrize(
    "kind",
    long_but(
        KINDS,
        short=["conversations"],
        why="test_2000_episodes_at_once_take_less_than_2_gigabytes[conversations]: of another player",
    ),
)
def test_2000_episodes_at_once_take_less_than_2_gigabytes(kind: str):
    command = [sys.executable, "-m", "tests.many_episodes", kind, str(NUMBER)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment())
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["episodes"] == found["at_once"] == NUMBER
    assert found["tokens"] >= 500 * NUMBER
    assert found["gigabytes"] < MOST_GIGABYTES, found
