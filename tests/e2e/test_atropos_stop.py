"""A trainer that waits for environments ends when it is asked to, and goes on later as if nothing had been."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.atropos_runs import Stage, stage, trained_ids, wait_for
from tests.e2e.runs import checkpoints, state
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer

BATCH = 4
# The wait that has to be cut short; longer than this test may take.
WAIT_S = 3000.0
# On a busy machine; and an end takes no longer than a start.
START_S = 200.0


def post_batch(job: Stage, number: int) -> None:
    """A batch of two groups, with names of their own."""
    for half in "ab":
        group: dict[str, Any] = {
            "tokens": [[12, 13, EOS_ID], [12, 14, EOS_ID]],
            "masks": [[-100, 13, EOS_ID], [-100, 14, EOS_ID]],
            "scores": [0.0, 1.0],
            "inference_logprobs": [[1.0, -4.0, -4.0], [1.0, -4.0, -4.0]],
            "group_overrides": {"group_id": f"{number}{half}"},
        }
        httpx.post(f"{job.api_url}/scored_data", json=group, trust_env=False).raise_for_status()


def wait_registered(job: Stage) -> None:
    """Until the trainer has registered, after which it waits for a batch."""

    def registered() -> bool:
        assert job.processes["trainer"].poll() is None, job.log("trainer")
        return httpx.get(f"{job.api_url}/info", trust_env=False).json()["batch_size"] == BATCH

    wait_for(registered, "the trainer's registration", timeout_s=START_S)


@pytest.mark.timeout(900)
def test_a_signal_ends_the_wait_for_a_batch(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with stage(tmp_path, model=tmp_path / "model", mode="lora_only", steps=2) as job:
        job.start_api()
        job.start_engine()
        config = job.write_config(source={"batch_size": BATCH, "wait_s": WAIT_S})

        # Nothing has come yet, and now the API does not even answer.
        job.start_trainer(config)
        wait_registered(job)
        job.processes["api"].send_signal(signal.SIGSTOP)
        job.processes["trainer"].send_signal(signal.SIGINT)
        assert job.wait_trainer(timeout_s=START_S) == 128 + signal.SIGINT, job.log("trainer")
        job.processes["api"].send_signal(signal.SIGCONT)
        assert "stopped by SIGINT after step 0; resume with: lachesis train" in job.log("trainer")
        assert "error:" not in job.log("trainer")
        assert (state(job.run_dir)["status"], state(job.run_dir)["step"]) == ("stopped", 0)
        assert checkpoints(job.run_dir) == ["step_000000"]

        # One batch has come, and the next one does not.
        post_batch(job, 1)
        job.start_trainer(config, "--resume")
        job.wait_step(1, timeout_s=START_S)
        job.processes["trainer"].send_signal(signal.SIGTERM)
        assert job.wait_trainer(timeout_s=START_S) == 128 + signal.SIGTERM, job.log("trainer")
        assert "stopped by SIGTERM after step 1; resume with: lachesis train" in job.log("trainer")
        assert (state(job.run_dir)["status"], state(job.run_dir)["step"]) == ("stopped", 1)
        assert checkpoints(job.run_dir)[-1] == "step_000001"
        assert (job.run_dir / "report.html").is_file()

        post_batch(job, 2)
        job.start_trainer(config, "--resume")
        assert job.wait_trainer(timeout_s=START_S) == 0, job.log("trainer")
        assert state(job.run_dir)["status"] == "finished"
        assert trained_ids(job.run_dir) == ["1a", "1b", "2a", "2b"]
