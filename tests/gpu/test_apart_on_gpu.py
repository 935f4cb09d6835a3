"""Two ranks and vLLM on GPUs of their own: each rank sends its share of the weights, to every engine.

PYTHONPATH=src:. python -m pytest tests/gpu/test_apart_on_gpu.py -s
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.e2e.runs import rewards
from tests.gpu.with_engine import LARGE, SMALL, train, write

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    pytest.mark.timeout(900),
]

ENGINES: dict[str, dict[str, Any]] = {
    "one engine over two": {"tensor_parallel_size": 2},
    "an engine on each": {"data_parallel_size": 2},
}
BROADCAST = {"kind": "broadcast", "transport": "nccl", "senders": 2}


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "larger"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_two_ranks_send_to_engines_on_gpus_of_their_own(
    engine: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    more = {} if sizes is SMALL else {"run": {"steps": 8}}
    config = write(tmp_path, engine=ENGINES[engine] | {"devices": "2,3"}, bridge=BROADCAST, sizes=sizes, **more)
    steps = train(config, monkeypatch)
    for number, values in enumerate(steps, start=1):
        assert values["weight_version"] == number
        assert values["canary_error"] <= 0.25
        shares = [values["sent_gb/0"], values["sent_gb/1"]]
        assert min(shares) > 0.3 * sum(shares), "both have sent"
    seconds = {name: median(values[name] for values in steps[1:]) for name in ("transfer_time", "proof_time")}
    sys.stdout.write(f"\n{engine}: {', '.join(f'{name} {value:.3f} s' for name, value in seconds.items())}\n")
    if sizes is SMALL:
        found = rewards(tmp_path / "runs" / "proof")
        assert found[-1] - found[0] > 0.5, "it learns in three steps: means of three say little"
