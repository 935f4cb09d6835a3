"""Benchmarks with ``--tiny``: that they run, and say what they measure. How fast anything is, is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.e2e.runs import environment
from tests.paths import BENCHMARKS
from tests.waiting import LONG_S

# Stands for a directory of the test's.
WORK = "WORK"
# By script: what of it runs here beside --tiny, and words that stand in what it prints.
RUN_HERE = {
    "api": ([], "groups_per_s"),
    "asynchrony": ([], "waits"),
    "code_execution": ([], "| namespaces |"),
    "end_to_end": (["--only", "Lachesis", "--engine", "embedded", "--steps", "2", "--prompts", "2", "--work", WORK],
                   "| Lachesis |"),
    "long_rows": (["--repeats", "1", "--only", "4B LoRA 65536"], "Qwen3-4B LoRA 65536"),
    "memory": (["--only", "1.5B, LoRA, 1024", "--steps", "2"], "1.5B, LoRA, 1024"),
    "multi_turn": ([], "rollouts"),
    "overlap": (["--work", WORK], "a step over the longer of generation and training"),
    "packing": ([], "| 128 | ragged | 4 | as they are |"),
    "reasoning_tasks": (["--only", "chain_sum"], "| chain_sum | 2 |"),
    "time_to_first_step": (["--engine", "embedded", "--prompts", "2", "--repeats", "0", "--work", WORK],
                           "| **longer than the engine alone** |"),
    "time_to_reward": (["--only", "Lachesis", "--seeds", "0", "--work", WORK], "| Lachesis | 0 |"),
    "transfer": (["--repeats", "1", "--only", "default", "aside"], "| a window of 2: the default |"),
    "turns": ([], "| 2 |"),
    "train_step": (["--no-trl", "--repeats", "1", "--only", "float32 residual"], "lachesis LoRA, float32 residual"),
}  # fmt: skip
# Those whose servers are vLLM's, and one that test_kills.py has a small version of.
BY_HAND = {"bridges", "checkpoint", "fleet", "generation", "kills", "sleep"}
# They say so where there is no GPU, before they make any model.
OF_A_GPU = [
    "bridges", "end_to_end", "fleet", "generation", "long_rows", "memory", "sleep", "time_to_first_step", "train_step",
    "transfer",
]  # fmt: skip
# What they measure is made by others' programs or files, which are not here.
OF_OTHERS = {"environments", "public_files", "public_rewards", "quickstart_vs_trl", "trl_side"}
NO_SCRIPTS = {"architectures", "drawn_lengths", "memory_rows", "needs_gpu", "overlap_table"}


def script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    start = (
        f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); "
        "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [sys.executable, "-c", start, str(BENCHMARKS / f"{name}.py"), *arguments]
    return warm.run(words, env=environment(), cwd=cwd, timeout=2 * LONG_S)


@pytest.mark.parametrize("name", sorted(RUN_HERE))
def test_it_runs(name: str, tmp_path: Path):
    arguments, words = RUN_HERE[name]
    given = [str(tmp_path / "work") if one == WORK else one for one in arguments]
    done = script(name, "--tiny", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert words in done.stdout


def test_a_mixture_trains_on_the_weights_of_its_engine(tmp_path: Path):
    """The small version of what a GPU measures: an adapter on shared weights, with routing replayed."""
    words = ["--size", "30B-A3B", "--only", "Lachesis", "--engine", "embedded", "--steps", "2", "--prompts", "2"]
    words += ["--set", "algorithm.router_replay=true", "--work", str(tmp_path / "work")]
    done = script("end_to_end", "--tiny", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("| Lachesis |") == 2 and "| 0.00% |" in done.stdout


@pytest.mark.parametrize("kind", [["--dtype", "float32"], ["--only", "LoRA"]], ids=" ".join)
def test_steps_over_lengths_drawn_anew(tmp_path: Path, kind: list[str]):
    done = script("train_step", "--tiny", "--drawn", "6", *kind, "--out", "steps.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "slowest step over the median" in done.stdout
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert [step["number"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert len({step["forward_tokens"] for step in steps}) == 6
    assert {step["groups"] for step in steps} <= {2, 3, 4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("name", OF_A_GPU)
def test_what_measures_a_gpu_says_that_there_is_none(name: str, tmp_path: Path):
    done = script(name, cwd=tmp_path)
    assert done.returncode == 1
    assert "torch sees none here; --tiny" in done.stderr


def test_each_script_has_a_small_version_that_is_tried_here_or_by_hand():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    small = {name for name in scripts if '"--tiny"' in (BENCHMARKS / f"{name}.py").read_text()}
    assert small == RUN_HERE.keys() | BY_HAND
    assert scripts == small | OF_OTHERS | NO_SCRIPTS
