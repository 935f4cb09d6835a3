"""What a run keeps of rollouts that came to no reward."""

from __future__ import annotations

import json
from pathlib import Path

from lachesis.rollouts.failures import FailureFile, note_failure
from tests.unit.rollouts.test_episodes import Dice, groups, killed, source


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_failure_is_a_line_while_somebody_listens(tmp_path: Path):
    path = tmp_path / "failures.jsonl"
    note_failure("before", cause="crash")
    with FailureFile(path):
        assert not path.exists(), "a run without failures has no file"
        note_failure("it ended with 3", cause="crash", prompt_id="7")
    note_failure("after", cause="crash")
    assert [(one["cause"], one["prompt"], one["message"]) for one in lines(path)] == [("crash", "7", "it ended with 3")]
    with FailureFile(path):  # the run goes on
        note_failure("later", cause="timeout")
    assert len(lines(path)) == 2


def test_a_directory_that_is_gone_ends_no_run(tmp_path: Path):
    with FailureFile(tmp_path / "none" / "failures.jsonl"):
        note_failure("it ended with 3", cause="crash")


def test_every_rollout_that_an_environment_loses_is_kept_with_its_prompt(tmp_path: Path):
    path = tmp_path / "failures.jsonl"
    episodes = source(Dice(killed))
    with FailureFile(path):
        groups(episodes)
    counts = episodes.counters()
    episodes.close()
    assert len(lines(path)) == counts["rollout_failures"] > 0
    assert all(one["prompt"] and one["message"] for one in lines(path))
