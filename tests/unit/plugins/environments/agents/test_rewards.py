from __future__ import annotations

from lachesis.plugins.environments.agents.rewards import exit_code, reported
from lachesis.rollouts.rewards.functions import Excluded


def test_exit_codes():
    assert exit_code([[]] * 3, exit_code=[0, 3, None]) == [1.0, 0.0, 0.0]


def test_what_was_reported_and_what_was_not():
    missing = Excluded("no reward reported")
    assert reported([[]] * 4, reported=["0.5", None, "high", "nan"]) == [0.5, missing, missing, missing]
    beyond = Excluded("the reported reward is not a usable number")
    assert reported([[]] * 3, reported=["1e308", "-inf", "-1e16"]) == [beyond] * 3
