"""What the health rules say of real runs: nothing that is not so of healthy ones, and of sick ones the cause."""

from __future__ import annotations

import pytest

from lachesis.metrics.health.rules import urgency
from tests.recordings import RECORDINGS, play, read

NAMES = sorted(path.stem for path in RECORDINGS.glob("*.json"))
HEALTHY = [name for name in NAMES if read(name)["cause"] is None]
SICK = [name for name in NAMES if name not in HEALTHY]
# Warnings that are so: half of the completions and more were cut off at the 20 to 32 tokens that these runs allow.
TRUE_WARNINGS = {"truncated_often"}
# A rule that tells causes apart says which it is.
WORDS = {
    "truncated": "of the completions hit 3 tokens: raise sampling.max_completion_length",
    "temperature_too_low": "are identical: raise sampling.temperature",
    "reward_zero": "because every completion got reward 0",
    "reward_of_the_prompt": "they depend on the prompt, not on the answer",
}


def test_there_are_runs_of_both_kinds() -> None:
    assert len(HEALTHY) >= 10 and len(SICK) >= 15


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_problem_and_no_untrue_warning(name: str) -> None:
    said = [one for one in play(read(name)) if one.finding.level != "note"]
    assert {one.finding.rule for one in said} <= TRUE_WARNINGS
    assert [one for one in said if one.finding.level == "problem"] == []


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_told_its_cause_first_within_ten_steps(name: str) -> None:
    recording = read(name)
    said = [one.finding for one in play(recording, steps=10) if one.finding.resolved is None]
    said.sort(key=lambda finding: urgency(finding.rule, finding.level))
    assert said and said[0].rule == recording["cause"]
    assert said[0].level != "note" and WORDS.get(name, "") in said[0].message


def test_what_a_healthy_run_was_told_is_resolved_as_it_learns() -> None:
    """Most completions of the first steps are cut off, until the model has learned to end."""
    said = [one for one in play(read("healthy_full")) if one.finding.rule == "truncated_often"]
    assert [one.finding.resolved is not None for one in said] == [False, True]


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"staleness": 6.0}, "samples_stale"),
        ({"logprob_diff_mean": 0.3}, "logprobs_differ"),
        ({"canary_ratio": 1.5}, "canary_off"),
        ({"grad_norm": 0.0}, "gradient_vanished"),
    ],
)
def test_a_fault_of_the_machinery_in_a_healthy_run_is_told_first(values: dict[str, float], cause: str) -> None:
    """What one machine does not show: an engine that has other weights than it says, or none that came."""
    recording = read("healthy_full")
    steps = [step | {"values": step["values"] | values} for step in recording["steps"]]
    said = [one.finding for one in play({**recording, "steps": steps}, steps=10) if one.finding.resolved is None]
    said.sort(key=lambda finding: urgency(finding.rule, finding.level))
    assert said[0].rule == cause
