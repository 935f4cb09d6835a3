from __future__ import annotations

from lachesis.rollouts.agent.rewards import exit_code, reported
from lachesis.rollouts.rewards.functions import Excluded


def test_exit_codes():
    assert exit_code([[]] * 3, exit_code=[0, 3, None]) == [1.0, 0.0, 0.0]


def test_what_was_reported_and_what_was_not():
    missing = Excluded("no reward reported")
    assert reported([[]] * 4, reported=["0.5", None, "high", "nan"]) == [0.5, missing, missing, missing]
