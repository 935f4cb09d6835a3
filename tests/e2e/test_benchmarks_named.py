"""Named benchmarks as a user evaluates them: `lachesis eval`, and beside a run; GSM8K, and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lachesis.plugins.benchmarks.results import read_results
from lachesis.plugins.benchmarks.section import BenchmarkConfig
from lachesis.plugins.benchmarks.table import problems_of
from lachesis.plugins.report.page import write_report
from tests import gsm8k
from tests.e2e.runs import command, metrics, run_here

QUESTIONS, KNOWN = 10, 8
DATA = gsm8k.DATA / "train.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers the first of the questions rightly, and no other."""
    directory = tmp_path_factory.mktemp("benchmarks")
    asked = BenchmarkConfig(name="gsm8k", path=str(DATA), max_problems=KNOWN)
    problems = problems_of(asked, tokenizer=gsm8k.tokenizer(), room=gsm8k.CONTEXT)
    answers = [f"\\boxed{{{str(problem.columns['solution']).strip('$')}}}" for problem in problems]
    prompts = [list(problem.token_ids) for problem in problems]
    return gsm8k.write_taught_model(directory / "model", prompts=prompts, texts=answers)


def evaluate(model: Path, *words: str | Path) -> str:
    done = command(
        "eval", model, "--benchmarks", f"gsm8k={DATA}", "--limit", str(QUESTIONS), "--max-tokens", "16", *words
    )
    assert done.code == 0, done.err
    return done.out


def test_a_model_is_evaluated_and_compared_with_another(tmp_path: Path, model: Path):
    other = gsm8k.write_model(tmp_path / "other")
    out = tmp_path / "results"
    told = evaluate(model, "--out", out).splitlines()
    assert told[0] == "gsm8k: mean@1 80 % (49 to 94 %), n = 10 problems"
    score = read_results(out)["gsm8k"]
    assert [right for right, _ in score.right.values()] == [1] * KNOWN + [0] * (QUESTIONS - KNOWN)
    evaluate(other, "--out", tmp_path / "of-other")
    compared = evaluate(out, "--against", tmp_path / "of-other").splitlines()
    assert compared[-1].startswith("gsm8k: +80.0 points on 10 problems (95 % interval +50.0 to +100.0; exact McNemar")
    assert compared[-1].endswith("p = 0.0078): a gain beyond chance")


def test_several_samples_give_mean_and_pass_at_k(tmp_path: Path, model: Path):
    told = evaluate(model, "--out", tmp_path / "results", "--samples", "2", "--temperature", "0.01").splitlines()
    assert told[0].startswith("gsm8k: mean@2 80 % (")
    assert ", pass@2 80 % (49 to 94 %), n = 10 problems" in told[0]


def test_a_run_evaluates_at_its_interval_and_its_steps_can_be_compared(tmp_path: Path, model: Path):
    config = {
        "run": {"name": "one", "dir": str(tmp_path), "steps": 2},
        "model": {"path": str(model)},
        "data": {"path": str(DATA), "split": "train[:2]", "prompt_column": "question"},
        "rewards": {"functions": [f"{tmp_path}/length.py:length"]},
        "sampling": {"num_generations": 2, "max_completion_length": 4},
        "batch": {"prompts_per_step": 2},
        "optimizer": {"learning_rate": 1e-9},
        "evaluation": {
            "every_steps": 1,
            "benchmarks": [{"name": "gsm8k", "path": str(DATA), "max_problems": QUESTIONS, "max_tokens": 16}],
        },
    }
    (tmp_path / "length.py").write_text(
        "def length(completion_ids, **_):\n    return [len(o) / 4 for o in completion_ids]\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    summary = run_here(path)
    assert [found.step for found in metrics(summary.run_dir).evaluations] == [0, 1, 2]
    for found in metrics(summary.run_dir).evaluations:
        assert (found.accuracy, found.problems) == (0.8, QUESTIONS)
        assert found.benchmarks["gsm8k"]["mean"] == 0.8
        assert found.benchmarks["gsm8k"].get("gain") == (None if found.step == 0 else 0.0)
    page = write_report(summary.run_dir).read_text("utf-8")
    assert "gsm8k: +0.0 points (+0.0 to +0.0), p = 1: not more than chance" in page
    results = summary.run_dir / "evaluations/benchmarks"
    told = evaluate(results / "step_000002", "--against", results / "step_000000").splitlines()
    assert told[-1].startswith("gsm8k: +0.0 points on 10 problems")
    assert told[-1].endswith("not more than chance")
    assert "gsm8k: mean@1 80 % (49 to 94 %), n = 10 problems" in evaluate(summary.run_dir)
    assert (results / "final/results.json").is_file()
