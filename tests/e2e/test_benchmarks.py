"""Benchmarks with ``--tiny``: that they run, and say what they measure. How fast anything is, is not looked at."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.contracts.vllm_server import ENVIRONMENT, entry_point, needs_vllm
from tests.e2e.runs import environment, torchrun
from tests.long import long_but
from tests.paths import BENCHMARKS, ROOT, SOURCE
from tests.ports import free_ports
from tests.waiting import LONG_S

# Stand for a directory of the test's, and for a port that is free as the one after it is.
WORK, PORT = "WORK", "PORT"
# By script: what of it runs here beside --tiny, and words that stand in what it prints.
RUN_HERE = {
    "api": ([], "groups_per_s"),
    "end_to_end": (["--only", "Lachesis", "--engine", "embedded", "--steps", "2", "--prompts", "2", "--work", WORK],
                   "| Lachesis |"),
    "hybrids": (["--repeats", "1", "--lengths", "ragged", "--trained", "LoRA", "--groups", "2"], '"way": "dense"'),
    "long_rows": (["--repeats", "1", "--only", "4B LoRA 65536"], "Qwen3-4B LoRA 65536"),
    "models": ([], "| qwen3_5_text | packed |"),
    "memory": (["--only", "1.5B, LoRA, 1024", "--steps", "2"], "1.5B, LoRA, 1024"),
    "multi_turn": ([], "rollouts/s"),
    "overlap": (["--work", WORK], "a step over the longer of generation and training"),
    "proof": (["--port", PORT, "--only", "broadcast, bf16", "LoRA by file"], "missed: 0, false alarms: 0"),
    "time_to_first_step": (["--engine", "embedded", "--prompts", "2", "--repeats", "0", "--work", WORK],
                           "| **longer than the engine alone** |"),
    "time_to_reward": (
        ["--only", "Lachesis", "--seeds", "0", "--ahead", "1", "--work", WORK], "| Lachesis | 0 |",
    ),
    "transfer": (["--repeats", "1", "--only", "default", "aside"], "| a window of 2: the default |"),
    "transports": (["--only", "embedded", "LoRA by file", "--port", PORT, "--work", WORK], "| LoRA by file |"),
    "train_step": (
        ["--no-trl", "--repeats", "1", "--only", "checkpointing", "--profile"], "lachesis LoRA, checkpointing",
    ),
}  # fmt: skip
# Those that take seconds and start no server; what the others measure has tests of its own.
SHORT = {"api", "end_to_end", "long_rows", "memory", "multi_turn", "time_to_first_step"}
RATE = r"[1-9][\d,]*"
WORST = r"\d+\.\d \(worst \d+\.\d\)"
# The same of those whose servers are vLLM's, with expressions for rows of their tables.
OVER_VLLM = {
    "bridges": (
        ["--only", "stock vLLM", "lora_only", "--in-flight", "1", "8", "--tokens", "8", "--repeats", "1",
         "--updates", "2", "--port", PORT, "--model-dir", f"{WORK}/model", "--logs", f"{WORK}/logs"],
        [rf"\| stock vLLM \| {RATE} / {RATE} \|",
         rf"\| lora_only \| {RATE} / {RATE} \| {WORST} \| {WORST} \| 0\.00\d\d \|"],
    ),
    "generation": (
        ["--only", "in process, logprobs", "our server", "--in-flight", "1", "8", "--repeats", "1",
         "--port", PORT, "--logs", WORK],
        [rf"\| {name} \| {RATE} \| {RATE} \|" for name in ("in process, logprobs", "our server")],
    ),
    "sleep": (
        ["--only", "small", "--port", PORT, "--work", WORK],
        [r"\| small, broadcast \| 3 \|( \d+\.\d{3} \(\d+\.\d{3}\) \|){4}"],
    ),
    "tenants": (["--port", PORT], [r'"sample_all": \d+', r'"train_all": \d+']),
}  # fmt: skip
OF_RANKS = {"checkpoint"}
# test_kills.py has small versions of kills, all of whose rows take half an hour; curves fetches a pretrained model.
BY_HAND = {"kills", "curves"}
# A dozen of its faults are in test_kills.py.
TESTED = {"chaos"}
# They say so where there is no GPU, before they make any model.
OF_A_GPU = [
    "bridges", "end_to_end", "generation", "long_rows", "memory", "sleep", "time_to_first_step", "train_step",
    "transfer",
]  # fmt: skip
# What they measure is made by others' programs or files, which are not here.
OF_OTHERS = {"health", "public_files", "public_rewards", "quickstart_vs_trl", "trl_async", "trl_side", "trl_suite"}
NO_SCRIPTS = {
    "architectures",
    "health_rewards",
    "kernel_times",
    "memory_rows",
    "needs_gpu",
    "overlap_table",
    "step_workloads",
    "vision_models",
}


def script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(warm.script(BENCHMARKS / f"{name}.py", *arguments), env=environment(), cwd=cwd, timeout=6 * LONG_S)


@pytest.mark.parametrize("name", long_but(sorted(RUN_HERE), short=SHORT, why="test_it_runs[api]: another script"))
def test_it_runs(name: str, tmp_path: Path):
    arguments, words = RUN_HERE[name]
    named = {WORK: str(tmp_path / "work"), PORT: str(free_ports(2))}
    given = [named.get(one, one) for one in arguments]
    done = script(name, "--tiny", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert words in done.stdout


@needs_vllm
@pytest.mark.long("test_it_runs[end_to_end]: another script, over a real vLLM")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(OVER_VLLM))
def test_it_runs_over_vllm(name: str, tmp_path: Path):
    """Script, parts and servers are forked from a process that has imported vLLM."""
    arguments, rows = OVER_VLLM[name]
    named = {WORK: str(tmp_path / "work"), PORT: str(free_ports(2))}
    given = [re.sub(f"^({WORK}|{PORT})", lambda found: named[found[0]], one) for one in arguments]
    paths = os.pathsep.join(map(str, [SOURCE, entry_point(tmp_path / "plugin"), ROOT]))
    variables = ENVIRONMENT | {"LACHESIS_SESSION_DIR": str(tmp_path / "sessions"), "PYTHONPATH": paths}
    done = warm.run(
        warm.script(BENCHMARKS / f"{name}.py", "--tiny", *given),
        env=environment(**variables), cwd=tmp_path, timeout=6 * LONG_S, popen=warm.VllmPopen,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for row in rows:
        assert re.search(row, done.stdout), done.stdout


@pytest.mark.long("test_it_runs[memory]: another script, which two ranks run")
def test_what_two_ranks_save_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    done = torchrun(2, "checkpoint", "--tiny", "--directory", tmp_path / "checkpoints")
    assert done.code == 0, done.err[-3000:]
    assert re.search(r"\| asynchronous, once more( \| \d+\.\d\d){3} \|", done.out), done.out
    assert "Read back: bit by bit the same." in done.out


def test_a_mixture_trains_on_the_weights_of_its_engine(tmp_path: Path):
    """The small version of what a GPU measures: an adapter on shared weights, with routing replayed."""
    words = ["--size", "30B-A3B", "--only", "Lachesis", "--engine", "embedded", "--steps", "2", "--prompts", "2"]
    words += ["--set", "algorithm.router_replay=true", "--work", str(tmp_path / "work")]
    done = script("end_to_end", "--tiny", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("| Lachesis |") == 2 and "| 0.00% |" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize(
    "name",
    long_but(
        OF_A_GPU,
        short=["bridges", "memory"],
        why="test_what_measures_a_gpu_says_that_there_is_none[bridges]: another script",
    ),
)
def test_what_measures_a_gpu_says_that_there_is_none(name: str, tmp_path: Path):
    done = script(name, cwd=tmp_path)
    assert done.returncode == 1
    assert "torch sees none here; --tiny" in done.stderr


def test_each_script_has_a_small_version_that_is_tried_here_or_by_hand():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    small = {name for name in scripts if '"--tiny"' in (BENCHMARKS / f"{name}.py").read_text()}
    assert small == RUN_HERE.keys() | OVER_VLLM.keys() | OF_RANKS | BY_HAND
    assert scripts == small | OF_OTHERS | NO_SCRIPTS | TESTED
