"""Rollout API, vLLM, environment and trainer, each a process that was started by hand: they learn, on the CPU."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import psutil
import pytest

from tests import warm
from tests.contracts.vllm_server import SMALL, needs_vllm
from tests.e2e.atropos_runs import BATCH, GROUP, RANK, Stage, answers, stage, trained_ids, wait_for, write_model
from tests.e2e.runs import metrics, state

pytestmark = needs_vllm
STEPS = 16
# vLLM's attention on the CPU knows no heads smaller than 32.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TOLERANCE = 1e-3
# The most that a start may take, on a machine that has other work.
START_S = 600.0


def start_vllm(job: Stage) -> None:
    """`lachesis serve --model ... --enable-lora`, and what makes vLLM small on a CPU."""
    job.start("engine", "serve", "--model", job.model, "--port", str(job.engine_port), "--dtype", "float32",
              "--max-model-len", "32", "--enforce-eager", "--enable-lora", "--max-lora-rank", str(RANK),
              "--adapter-root", job.directory, popen=warm.VllmPopen)  # fmt: skip

    def serves() -> bool:
        assert job.processes["engine"].poll() is None, job.log("engine")[-3000:]
        return answers(f"{job.engine_url}/health")

    wait_for(serves, "vLLM", timeout_s=START_S)


def all_processes(job: Stage) -> list[psutil.Process]:
    """Those that were started here and what they started themselves, such as vLLM's engine core."""
    started = [psutil.Process(process.pid) for process in job.processes.values() if process.poll() is None]
    return [*started, *(child for process in started for child in process.children(recursive=True))]


@pytest.mark.timeout(1500)
def test_four_processes_learn_on_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    model = write_model(tmp_path / "model", **HEADS)
    with stage(tmp_path, model=model, mode="lora_only", steps=STEPS) as job:
        job.start_api("--strict")
        start_vllm(job)
        job.start_trainer(job.write_config(source={"wait_s": START_S}))
        job.start_environment()
        assert job.wait_trainer(timeout_s=600) == 0, job.log("trainer")
        assert all(job.processes[name].poll() is None for name in ("api", "engine")), "they outlive the trainer"
        running = all_processes(job)
        assert len(running) >= 3, "vLLM's engine core is a process of its own"
    wait_for(lambda: not any(process.is_running() for process in running), "the end of all processes")

    assert state(job.run_dir)["status"] == "finished"
    steps = metrics(job.run_dir).steps
    assert [line.step for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert line.values["weight_version"] == line.step, "every step's weights went to vLLM"
        assert line.values["canary_error"] < TOLERANCE, "and vLLM computes with them"
        # Samples of a version before are among them; what vLLM says of its own is right nevertheless.
        assert line.values.get("logprob_diff_mean", 0.0) < TOLERANCE
    assert "disagree" not in job.log("trainer")
    rewards = [line.values["reward"] for line in steps]
    assert fmean(rewards[-4:]) - fmean(rewards[:4]) >= 0.3, rewards
    ids = trained_ids(job.run_dir)
    assert len(ids) == len(set(ids)) == STEPS * BATCH // GROUP
