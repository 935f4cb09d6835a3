"""Environments that are stepped, in runs on the embedded engine: the example, rewards of functions, and learning."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import yaml

from lachesis.common.errors import RewardError
from lachesis.metrics.sinks.tape import read_groups, tape_files
from tests.e2e.runs import Main, metrics, rewards, run_here, write_run
from tests.paths import EXAMPLES
from tests.tiny import tiny_model, tiny_tokenizer

STEPS = EXAMPLES / "environments"
# Which of two letters is it? A wrong guess is answered by c, and half is left for the second.
GAME = '''
class Which:
    def __init__(self, broken=False):
        self.broken = broken

    def reset(self, seed):
        if self.broken:
            raise OSError("no game today")
        self.right, self.guesses = "ab"[seed % 2], 0
        return "dc"

    def step(self, action):
        self.guesses += 1
        right = action == self.right
        return "c", right / self.guesses, right or self.guesses == 2, False, {}


class Tools:
    def reset(self, **columns):
        self.said = columns["prompt"][-1]["content"]

    def say(self, word: str) -> str:
        """
        Say a word.

        Args:
            word: any
        """
        return word


def seen(completions, environments, log_metric, **columns):
    log_metric("environments", len(environments))
    return [float(len(env.said) + len(turns)) for env, turns in zip(environments, completions, strict=True)]
'''
SOURCE = {"kind": "steps", "environment": "game.py:Which", "max_tasks": 40, "max_turns": 2, "turn_tokens": 1}
NO_DATASET = {"data": {"path": None, "eval_path": None, "eval_size": 0}, "rewards": {"functions": []}}


def config(directory: Path, *, source: dict, **sections: dict) -> Path:
    path = write_run(directory, **NO_DATASET, **sections)
    (directory / "game.py").write_text(GAME)
    document = yaml.safe_load(path.read_text())
    document["source"] = source
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_game_of_two_turns_is_learned(tmp_path: Path):
    """Whoever knows one letter well and takes the other after a hint has 0.75; the fresh model has 0.3."""
    sections = {"batch": {"prompts_per_step": 16}, "sampling": {"num_generations": 8, "max_completion_length": 4}}
    summary = run_here(config(tmp_path, source=SOURCE, **sections), "run.steps=30")
    found = rewards(summary.run_dir)
    assert fmean(found[-3:]) - fmean(found[:3]) > 0.2
    last = read_groups(sorted(tape_files(summary.run_dir / "rollouts").items())[-1][1])
    samples = [sample for group in last for sample in group.samples]
    assert {sample.mask for sample in samples} == {None, (1, 0, 1)}
    assert {sample.finish_reason for sample in samples} == {"stop"}, "a turn's own limit cuts nothing off"


def test_the_example_trains_two_steps(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    outcome = main(
        "train", STEPS / "steps.yaml", f"--set=model.path={tmp_path / 'model'}", "--set=run.steps=2",
        "--set=evaluation.every_steps=1",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    log = metrics(tmp_path / "runs" / "steps")
    assert [line.values["rollout_failures"] for line in log.steps] == [0.0, 0.0]
    assert all(1.0 <= line.values["reward_metrics/turns"] <= 3.0 for line in log.steps)
    assert [evaluation.problems for evaluation in log.evaluations] == [20, 20, 20]


def test_reward_functions_get_the_environments(tmp_path: Path):
    """As TRL's do, of an environment that has no reward of its own; the last reward of one that has is its own."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": [{"role": "user", "content": "ab"}]}\n' * 4)
    tools = {"kind": "steps", "environment": "game.py:Tools", "tasks": "tasks.jsonl"}
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    path = config(tmp_path, source=tools, model=template)
    run_dir = run_here(path, "run.steps=1", 'rewards.functions=["game.py:seen"]').run_dir
    (line,) = metrics(run_dir).steps
    assert line.values["rewards/seen/mean"] == 3.0


def test_what_fails_is_said(tmp_path: Path):
    path = config(tmp_path, source=SOURCE | {"args": {"broken": True}})
    with pytest.raises(RewardError, match=r"failed \(environment \d+\)"):
        run_here(path, "run.steps=1")
