"""Waits between attempts are short here, and the goodbye may take its time."""

from __future__ import annotations

import pytest

from lachesis.plugins.atropos.environments import client, rollout_api, runner
from tests.waiting import LONG_S


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(client, "_LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(rollout_api, "_PAUSE_S", 0.01)
    monkeypatch.setattr(rollout_api, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(rollout_api, "_TRAINER_POLL_S", 0.01)
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    monkeypatch.setattr(runner, "_GOODBYE_S", LONG_S)
