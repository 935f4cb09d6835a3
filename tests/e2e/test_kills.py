"""Small versions of `benchmarks/kills.py` and `benchmarks/chaos.py`: processes of a run, killed, stopped and short."""

from __future__ import annotations

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


# Of each process and of three pairs; two are stopped for longer than a run may say nothing of it.
FAULTS = (
    ("kill", ("engine 1",), None),
    ("stop", ("rollout API",), 3.0),
    ("kill", ("environment 1",), None),
    ("stop", ("environment 1", "environment 2"), 3.0),
    ("memory", ("environment 2",), 1.0),
    ("kill", ("rollout API", "environment 2"), None),
    ("stop", ("engine 2",), 8.0),
    ("kill", ("engine 1", "environment 1"), None),
    ("memory", ("rollout API",), 1.0),
    ("stop", ("trainer",), 3.0),
    ("kill", ("trainer",), None),
    ("kill", ("rollout API",), None),
)


@pytest.mark.long(
    "test_atropos_run.py::test_each_may_be_killed_and_no_group_is_lost_or_trained_on_twice: with more faults"
)
@pytest.mark.timeout(600)
def test_a_dozen_faults_lose_nothing_and_end_with_a_sentence_where_they_end(tmp_path: Path):
    chaos = load("chaos")
    model = write_model(tmp_path / "model", **chaos.HEADS)
    setting = chaos.Setting(model, kinds=("kill", "stop", "memory"), forked=True)
    faults = [chaos.Fault(number, *fault) for number, fault in enumerate(FAULTS)]
    found = chaos.trial(setting, faults, seed=4, root=tmp_path / "run")
    assert not found["flaws"]
    assert [fault["number"] for fault in found["faults"]] == list(range(len(FAULTS)))
    assert (found["lost"], found["doubled"], found["gaps"], found["left"]) == (0, 0, 0, 0)
    assert chaos.table([found])[-1].startswith("\n12 faults in 1 runs")


def test_faults_are_drawn_by_seed_and_number_and_each_pair_takes_its_turn():
    chaos = load("chaos")
    drawn = [chaos.draw(number, seed=3, kinds=("kill", "stop")) for number in range(42)]
    assert drawn == [chaos.draw(number, seed=3, kinds=("kill", "stop")) for number in range(42)]
    assert {fault.names for fault in drawn[:21]} == {fault.names for fault in drawn[21:]} == set(chaos.TARGETS)
    assert drawn != [chaos.draw(number, seed=4, kinds=("kill", "stop")) for number in range(42)]
