"""A run begins with answers, and goes on with rewards."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.runs import metrics, run_here, state, untimed, weights, write_run

LETTERS = "abcd"
REWARD = """
def right(completions, answer, **columns):
    return [float(completion[0]["content"] == text) for completion, text in zip(completions, answer)]
"""
ANSWERED = 18


def continued(letter: str) -> str:
    """The three letters after it."""
    return "".join((LETTERS * 2)[LETTERS.index(letter) + 1 :][:3])


def write(directory: Path, **sections: Any) -> Path:
    """A run of the doctor's model that is to go on with the alphabet, with answers to its problems."""
    path = write_run(
        directory,
        rewards={"functions": [f"{directory / 'right.py'}:right"]},
        sampling={"max_completion_length": 5},
        optimizer={"learning_rate": 3e-3},
        run={"name": "run", "dir": str(directory / "runs"), "steps": 6, "stages": ["sft", "grpo"]},
        sft={"steps": ANSWERED, "batch_size": 16, "learning_rate": 1e-2},
        checkpoint={"save_final": True, "every_steps": 1},
    )
    (directory / "right.py").write_text(REWARD)
    rows = [{"prompt": f"{a}{b}", "answer": continued(b)} for a in LETTERS for b in LETTERS]
    (directory / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | sections))
    return path


def test_a_start_with_answers_learns_and_goes_on_with_rewards_and_resumes_in_the_midst_of_it(tmp_path: Path):
    run_dir = run_here(write(tmp_path / "straight")).run_dir
    lines = [line.values for line in metrics(run_dir).steps]
    answered, rewarded = lines[:ANSWERED], lines[ANSWERED:]
    assert len(rewarded) == 6 and state(run_dir)["steps"] == ANSWERED + 6
    assert answered[-1]["sft_loss"] < 0.5 * answered[0]["sft_loss"]
    assert all("reward" not in line for line in answered) and all("sft_loss" not in line for line in rewarded)
    assert [line["learning_rate"] for line in lines] == [1e-2] * ANSWERED + [3e-3] * 6
    assert rewarded[0]["reward"] > 0.4 and rewarded[0]["mean_ratio"] > 0.99, "by chance one in 1,300 is right"
    assert rewarded[-1]["reward"] > rewarded[0]["reward"]
    assert [line["weight_version"] for line in lines] == [*accumulate([1.0] * len(lines))]

    config = write(tmp_path / "stopped")
    run_here(config, stop_after=5)
    resumed = run_here(config, resume=True).run_dir
    assert untimed(resumed)[0] == untimed(run_dir)[0]
    own, straight = weights(resumed), weights(run_dir)
    assert all((own[name] == straight[name]).all() for name in straight)
