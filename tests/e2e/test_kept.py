"""A trainer is killed amid slow episodes: what was finished is not asked for again, and is trained on as it was."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis.common.types import Group
from lachesis.metrics.sinks.tape import read_groups, tape_files
from lachesis.rollouts.record_store import RecordStore
from tests.e2e.runs import checkpoints, command, metrics, run_here, write_run
from tests.warm import COMMAND

# Two turns. In the process that is to be killed the episodes after the 21st hang: 16 are those of two steps, so of the
# third 5 of 8 are finished when it dies, which is once the trainer waits for these with the checkpoint of step 2
# behind it. Whether a group of them was whole by that checkpoint, and is in it, depends on which was faster.
GAME = """
import itertools, os, pathlib, signal, threading, time

ended, log = itertools.count(1), pathlib.Path(__file__).with_name("ended.txt")
second = log.with_name("runs") / "proof" / "checkpoints" / "step_000002"


def die():
    while not second.exists():
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


class Slow:
    def reset(self, seed):
        self.seed, self.turns = seed, 0
        return "dc"

    def step(self, action):
        self.turns += 1
        if self.turns == 1:
            return "c", 0.0, False, False, {}
        if (number := next(ended)) > 21 and os.environ.get("TO_BE_KILLED"):
            if number == 22:
                threading.Thread(target=die).start()
            time.sleep(600)
        with log.open("a") as file:
            file.write(f"{self.seed}\\n")
        return "", float("a" in action), True, False, {}
"""
KILLED = f"import os; os.environ['TO_BE_KILLED'] = '1'; {COMMAND}"
SIZE, PROMPTS, STEPS = 4, 2, 4


def write(directory: Path, **pipeline: object) -> Path:
    path = write_run(
        directory,
        data={"path": None, "eval_path": None, "eval_size": 0},
        rewards={"functions": []},
        run={"steps": STEPS},
        batch={"prompts_per_step": PROMPTS},
        sampling={"num_generations": SIZE, "max_completion_length": 8},
        checkpoint={"every_steps": 1},
        pipeline={"async_prefetch": True, **pipeline},
    )
    (directory / "slow.py").write_text(GAME)
    config = yaml.safe_load(path.read_text())
    config["source"] = {"kind": "steps", "environment": "slow.py:Slow", "max_tasks": 40, "turn_tokens": 2}
    path.write_text(yaml.safe_dump(config))
    return path


def ended(directory: Path) -> Counter[str]:
    """How many episodes of each task came to their end, in both processes."""
    return Counter((directory / "ended.txt").read_text().split())


def kept_in(run_dir: Path, *, newest: float = math.inf) -> list[dict[str, Any]]:
    """The records of rollouts that a process has left, of weights no newer than those."""
    store = RecordStore(run_dir / "kept.sqlite")
    found = [entry.record for entry in store.read()[0] if "number" in entry.record]
    store.close()
    return [record for record in found if record["newest"] <= newest]


def whole_in(checkpoint: Path) -> set[str]:
    """The prompts of groups that are finished in a checkpoint, and in no batch yet."""
    places = json.loads((checkpoint / "meta.json").read_text())["feed"]["feed"]["line"]["places"]
    return {place["group"]["prompt"]["id"] for place in places if place["finished"]}


def trained_in(run_dir: Path) -> list[Group]:
    return [group for path in tape_files(run_dir / "rollouts").values() for group in read_groups(path)]


def test_nothing_that_was_finished_is_asked_for_again_after_a_stop(tmp_path: Path):
    config, run_dir = write(tmp_path), tmp_path / "runs" / "proof"
    assert not run_here(config, stop_after=2).finished
    # One whose last turn is in its environment's hands when the run stops is under way, and begins anew.
    finished = Counter(record["group"]["prompt"]["id"] for record in kept_in(run_dir))
    assert finished, "the run was ahead"
    # A group that was whole by the last checkpoint is in it, and taken from there.
    whole = set(finished) & whole_in(run_dir / "checkpoints" / "step_000002")
    left = sum(count for task, count in finished.items() if task not in whole)
    for group in trained_in(run_dir):
        finished[group.prompt.id] += len(group.samples)
    (tmp_path / "ended.txt").unlink()
    assert run_here(config, resume=True).finished
    again = ended(tmp_path)
    assert {task: again[task] for task in finished if again[task] > SIZE - finished[task]} == {}
    assert len({group.prompt.id for group in trained_in(run_dir)}) == STEPS * PROMPTS
    values = [line.values for line in metrics(run_dir).steps]
    taken = {name: sum(line.get(name, 0.0) for line in values) for name in ("kept_groups", "kept_rollouts")}
    assert taken["kept_rollouts"] + SIZE * taken["kept_groups"] == left
    assert sum(line.get("kept_let_go", 0.0) for line in values) == 0


@pytest.mark.parametrize("keep", [True, False])
def test_finished_episodes_are_not_asked_for_again_after_kill_9(tmp_path: Path, keep: bool):
    config = write(tmp_path, **({} if keep else {"keep_partial": False}))
    assert command("train", config, code=KILLED).code == -9
    run_dir = tmp_path / "runs" / "proof"
    assert "step_000002" in checkpoints(run_dir) and ended(tmp_path).total() == 21
    kept = kept_in(run_dir, newest=2)
    before = ended(tmp_path)
    partial = sum(count for count in before.values() if count < SIZE)
    whole = whole_in(run_dir / "checkpoints" / "step_000002")

    assert run_here(config, resume=True).finished
    steps = metrics(run_dir).steps
    assert [line.step for line in steps] == list(range(1, STEPS + 1))
    trained = trained_in(run_dir)
    assert len({group.prompt.id for group in trained}) == STEPS * PROMPTS, "none twice, none lost"
    assert {len(group.samples) for group in trained} == {SIZE}
    again = {task: count for task, count in ended(tmp_path).items() if count > SIZE}
    if not keep:
        assert again and not kept and "kept_rollouts" not in steps[-1].values
        return
    assert not again, "each episode came to its end once"
    values = [line.values for line in steps[2:]]
    taken = sum(line["kept_rollouts"] for line in values) + SIZE * sum(line["kept_groups"] for line in values)
    assert taken == 5 - SIZE * len(whole), "what is in the checkpoint is taken from there"
    assert sum(line["kept_let_go"] for line in values) == 0 < partial
    found = {
        (sample.completion_ids, sample.logprobs, sample.versions, sample.mask)
        for group in trained
        for sample in group.samples
    }
    for record in kept:
        (sample,) = record["group"]["samples"]
        exact = (tuple(sample["completion_ids"]), tuple(sample["logprobs"]), tuple(sample["versions"]))
        assert (*exact, tuple(sample["mask"])) in found, "as they were sampled"
