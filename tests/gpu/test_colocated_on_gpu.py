"""Two ranks and vLLM on the same two GPUs: what learns, what is proved, and how long the engine's sleep takes.

PYTHONPATH=src:. python -m pytest tests/gpu/test_colocated_on_gpu.py -s
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.e2e.runs import rewards
from tests.e2e.test_learning import sharpen
from tests.gpu.with_engine import LARGE, SMALL, train, write

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(900),
]

ENGINES: dict[str, dict[str, Any]] = {
    "one engine over both": {"tensor_parallel_size": 2, "enable_sleep_mode": True},
    "a copy on each": {"data_parallel_size": 2, "enable_sleep_mode": True},
}
CYCLE = ("sleep_time", "wake_time", "transfer_time", "proof_time", "train_time", "generation_time", "step_time")


def check_cycle(steps: list[dict[str, float]], *, what: str) -> None:
    """Each step had its weights, proved, and the engine slept through its training. Prints the seconds."""
    for number, values in enumerate(steps, start=1):
        assert values["weight_version"] == number
        assert values["canary_error"] <= 0.25
        assert values["sleep_time"] > 0 and values["wake_time"] > 0
        assert {"train_time/0", "train_time/1"} <= values.keys()
    seconds = {name: median(values[name] for values in steps[1:]) for name in CYCLE}
    sys.stdout.write(f"\n{what}: {', '.join(f'{name} {value:.3f} s' for name, value in seconds.items())}\n")


@pytest.mark.parametrize(
    ("engine", "bridge"),
    [
        ("one engine over both", "broadcast"),
        ("a copy on each", "broadcast"),
        ("one engine over both", "lora_nccl"),
        ("a copy on each", "lora_nccl"),
    ],
)
def test_two_gpus_train_and_generate_in_turn(engine: str, bridge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = write(tmp_path, engine=ENGINES[engine], bridge={"kind": bridge}, sizes=SMALL)
    if bridge == "lora_nccl":
        sharpen(tmp_path)
    steps = train(config, monkeypatch)
    check_cycle(steps, what=f"{engine}, {bridge}")
    found = rewards(tmp_path / "runs" / "proof")
    assert found[-1] - found[0] > 0.5, "it learns in three steps: means of three say little"


def test_the_cycle_of_a_larger_model_leaves_both_sides_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """1.3 billion parameters: what a step holds of a card does not grow from the second to the last."""
    engine, bridge = ENGINES["one engine over both"], {"kind": "broadcast"}
    config = write(tmp_path, engine=engine, bridge=bridge, sizes=LARGE, run={"steps": 8})
    steps = train(config, monkeypatch)
    check_cycle(steps, what="1.3 billion parameters")
    held = [name for name in steps[1] if name.startswith("gpu_memory_in_use_gb/")]
    assert held, "what each GPU holds was measured"
    for name in held:
        assert steps[-1][name] <= steps[1][name] * 1.05 + 0.2, name
