"""The Atropos trainer's flags for some layers only, in single copy, with held-out problems of the trainer's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lachesis.plugins.atropos.environments.shipped.arithmetic import problems
from tests.e2e.atropos_runs import BATCH, PROBLEMS, stage, write_model
from tests.e2e.runs import metrics, weights

REWARD = """
def right(completions, answer, **_):
    return [float(one[0]["content"].strip() == expected) for one, expected in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("atropos") / "model")


def test_one_layer_is_trained_and_the_trainer_evaluates(model: Path, tmp_path: Path):
    known, _ = problems(seed=0)
    rows = [json.dumps({"prompt": item.prompt, "answer": item.answer}) for item in known[:PROBLEMS]]
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows))
    (tmp_path / "right.py").write_text(REWARD)
    with stage(tmp_path, model=model, mode="shared_vllm", steps=3) as job:
        job.start_api("--strict")
        job.start_engine()
        job.start_environment()
        words = [
            *("--model", model, "--single-copy", "--train_layer_indices", "1-1", "--device", "cpu", "--lr", "2e-3"),
            *("--vllm-port", job.engine_port, "--atropos-url", job.api_url, "--training-steps", 3, "--kl-coef", 0),
            *("--batch-size", BATCH, "--save-path", job.run_dir, "--set", "data.eval_path=held_out.jsonl"),
            *("--set", "rewards.functions=[right.py:right]", "--set", "evaluation.every_steps=2"),
            *("--set", "sampling.max_completion_length=8"),
        ]
        job.start("trainer", "grpo", *map(str, words))
        assert job.wait_trainer() == 0, job.log("trainer")
        evaluations = metrics(job.run_dir).evaluations
        assert [one.step for one in evaluations] == [0, 2, 3]
        assert all(one.problems == PROBLEMS for one in evaluations)
        # Half of them are known by heart, half-way, so that some greedy answers are right.
        assert max(one.accuracy for one in evaluations) > 0
        before, after = load_file(model / "model.safetensors"), weights(job.run_dir)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {name for name in before if ".layers.1." in name}
