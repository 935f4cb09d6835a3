"""`lachesis doctor CONFIG` where there is a GPU: vLLM beside the trainer.

PYTHONPATH=src:. python -m pytest tests/gpu/test_doctor_on_gpu.py -s
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_doctor import check, doctor, write

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    ("bridge", "engine"),
    [
        ({"kind": "broadcast"}, {}),
        ({"kind": "lora_only"}, {}),
        pytest.param({"kind": "broadcast", "transport": "nccl"}, {"devices": "1"}, marks=two_gpus),
    ],
    ids=["broadcast", "lora_only", "broadcast by NCCL to a card of its own"],
)
def test_what_a_run_over_vllm_needs_is_tried(bridge: dict[str, Any], engine: dict[str, Any], tmp_path: Path):
    # vLLM's kernels for adapters on a GPU take no float32.
    config = write(tmp_path, bridge=bridge, device="cuda", dtype="bfloat16", **engine)
    started = time.monotonic()
    done = doctor(config)
    seconds = check(done, config=config, kind=bridge["kind"]) | {"command": time.monotonic() - started}
    sys.stdout.write(f"\n{bridge}: {', '.join(f'{name} {value:.2f} s' for name, value in seconds.items())}\n")
