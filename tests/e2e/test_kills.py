"""A small version of `benchmarks/kills.py`, which kills each process of `lachesis run` several times at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.atropos_runs import write_model
from tests.unit.test_benchmarks import load


@pytest.mark.timeout(600)
def test_a_run_whose_trainer_is_killed_goes_on_with_resume_and_loses_nothing(tmp_path: Path):
    kills = load("kills")
    model = write_model(tmp_path / "model")
    found = kills.trial(tmp_path, model, kills.VICTIMS["trainer"], kills=1, seed=0, steps=10, forked=True)
    assert found.kills == 1
    assert (found.code, found.lost, found.doubled, found.gaps, found.left) == (0, 0, 0, 0, 0)


@pytest.mark.timeout(600)
def test_a_run_with_faults_drawn_at_random_loses_nothing_and_tells_of_what_is_stopped(tmp_path: Path):
    kills = load("kills")
    model = write_model(tmp_path / "model")
    stopped = kills.Fault((random.Random(4).choice(["environment", "engine, shared weights"]),), 6.0)
    faults = [stopped, *kills.draw_faults(random.Random(4), 1)]
    found, silent = kills.chaos(tmp_path, model, faults, seed=4, steps=12, forked=True)
    assert (found.code, found.lost, found.doubled, found.gaps, found.left) == (0, 0, 0, 0, 0)
    assert not silent
