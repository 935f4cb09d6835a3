"""Training by ranks on two GPUs, and on four, over NCCL. Not part of `make test`: run where they are.

PYTHONPATH=src python -m pytest tests/gpu/test_sharded_on_gpu.py
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.runs import metrics, state, torchrun, weights, write_dying_loss, write_run
from tests.ranks_program import GPU_CASES

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

COMPILED = ["compiled"]
OTHERS = [
    "full",
    "lora_ema",
    "gathered",
    "groups_of_one",
    "replicate",
    *(name for name in GPU_CASES if name not in COMPILED),
]
# Layouts of four, in float64. Those in float32 are compared over gloo alone: a GPU sums up in another order.
OF_FOUR = [
    *("fsdp_of_four", "hsdp"),
    *("hsdp_moe", "shard_context", "replicate_context", "context_expert_of_four"),
    *("shard_expert", "replicate_expert", "expert_of_four"),
]
SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": 6},
    "model": {"compile": "off", "dtype": "float32"},
    "batch": {"prompts_per_step": 12, "max_tokens_per_microbatch": 256},
    "algorithm": {"beta": 0.01},
    "checkpoint": {"every_steps": 3, "save_final": True, "asynchronous": True},
}


@pytest.mark.parametrize("cases", [OTHERS, COMPILED], ids=["", "compiled"])
def test_two_gpus_learn_what_one_learns(cases: list[str]):
    done = torchrun(2, "tests.ranks_program", "--device", "cuda", *cases)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.out.splitlines() == [f"{case}: equal over 2 ranks" for case in cases]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.timeout(600)
def test_four_gpus_learn_what_one_learns():
    done = torchrun(4, "tests.ranks_program", "--device", "cuda", *OF_FOUR, timeout_s=500)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.out.splitlines() == [f"{case}: equal over 4 ranks" for case in OF_FOUR]


def test_a_run_on_two_gpus_is_that_of_one_and_is_resumed(tmp_path: Path):
    """Sampling may part ways with the last digits of a logit: the first step is compared, and what is left behind."""
    alone = torchrun(1, "lachesis", "train", write_run(tmp_path / "alone", **SECTIONS))
    assert alone.code == 0, alone.err
    config = write_run(tmp_path / "ranks", **SECTIONS)
    first = torchrun(2, "lachesis", "train", config, "--set", "run.steps=3")
    assert first.code == 0, first.err
    parts = sorted(path.name for path in (tmp_path / "ranks/runs/proof/checkpoints/step_000003/parts").iterdir())
    assert parts == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    second = torchrun(2, "lachesis", "train", config, "--resume")
    assert second.code == 0, second.err
    expected, found = (metrics(tmp_path / name / "runs/proof").steps for name in ("alone", "ranks"))
    assert [line.step for line in found] == [1, 2, 3, 4, 5, 6]
    for name in ("reward", "loss", "grad_norm", "entropy", "tokens_trained"):
        assert found[0].values[name] == pytest.approx(expected[0].values[name], rel=1e-3, abs=1e-4), name
    assert found[-1].values["reward"] > found[0].values["reward"]
    saved, whole = weights(tmp_path / "ranks/runs/proof"), weights(tmp_path / "alone/runs/proof")
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in whole.items()}
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


@pytest.mark.parametrize(("rank", "name"), [(0, "the leader, rank 0 (process "), (1, "rank 1 (process ")])
def test_a_rank_that_is_killed_in_a_collective_ends_the_other(tmp_path: Path, rank: int, name: str):
    loss = write_dying_loss(tmp_path, rank=rank, at_call=4)
    config = write_run(tmp_path / "run", **SECTIONS | {"algorithm": {"loss": loss}})
    started = time.monotonic()
    done = torchrun(2, "lachesis", "train", config)
    assert time.monotonic() - started < 120
    assert done.code != 0
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert name in error, error
    if rank > 0:
        assert state(tmp_path / "run/runs/proof")["status"] == "failed"
