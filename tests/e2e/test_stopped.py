"""What is stopped for ever is told in the run's output within seconds, whichever process it is."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.atropos_runs import write_model
from tests.unit.test_benchmarks import load

# A second's pause between looks and what a question may take; those that answer elsewhere are asked by the API.
TOLD_S = 5.0
STOPPED = {
    ("engine 1",): ["the engine at http://.* is stopped by a signal.* kill -CONT"],
    ("environment 1",): ["the environment .* has not contacted the rollout API for"],
    ("rollout API",): ["the rollout API at http://.* has not answered for"],
    ("engine 2", "environment 2"): ["the engine at http", "the environment .* has not contacted"],
}


def _seconds(run, names: Sequence[str], lines: Sequence[str]) -> float:
    """How long it takes until each of these lines is there after all processes of that name are stopped."""
    since, began = run.trainer.size(), time.monotonic()
    stopped = [process for name in names for process in run.members[name].family()]
    assert stopped
    for process in stopped:
        process.suspend()
    try:
        while not all(re.search(f"^warning: {line}", run.trainer.text(since), re.MULTILINE) for line in lines):
            assert time.monotonic() - began < 60, run.trainer.text(since)[-2000:]
            time.sleep(0.02)
        return time.monotonic() - began
    finally:
        for process in stopped:
            process.resume()


@pytest.mark.timeout(600)
def test_a_stopped_process_is_told_within_five_seconds_and_the_run_goes_on_once_it_is_resumed(tmp_path: Path):
    chaos = load("chaos")
    model = write_model(tmp_path / "model", **chaos.HEADS)
    setting = chaos.Setting(model, kinds=("stop",), forked=True, wait_s=300.0)
    with chaos.places(tmp_path / "run", networks=False, disks=False) as at:
        run = chaos.Run(at, setting, clocks=None)
        try:
            run.start()
            assert run.wait_started()
            for names, lines in STOPPED.items():
                took_s = _seconds(run, names, lines)
                assert took_s < TOLD_S * chaos._busy(), (names, took_s)
                assert run.wait_steps(2), names
        finally:
            run.stop()
        assert not run.flaws
        assert not run.left()
