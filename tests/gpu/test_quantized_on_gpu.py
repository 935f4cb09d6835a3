"""Quantized bases on a GPU, where bitsandbytes has kernels of its own. Not part of `make test`.

PYTHONPATH=src:. python -m pytest tests/gpu/test_quantized_on_gpu.py
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lachesis.bridges.proof import QUANTIZED_TOLERANCE
from lachesis.train.batch import pack
from lachesis.train.model.quantization import held_bytes, quantized_layers
from tests.e2e.runs import metrics, run_here, write_run
from tests.e2e.test_learning import rise, sharpen
from tests.gpu.test_vllm_on_gpu import CANARY, live, write_model
from tests.unit.train.model.test_forward import random_groups

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("environment"),
]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_an_adapter_learns_and_generates_on_one_network(kind: str, tmp_path: Path):
    model = {"quantization": kind, "dtype": "bfloat16", "device": "cuda"}
    config = write_run(tmp_path, model=model, adapter={"kind": "lora", "r": 8})
    sharpen(tmp_path)
    summary = run_here(config)
    assert rise(summary.run_dir) > 0.3
    for line in metrics(summary.run_dir).steps:
        assert math.isclose(line.values["mean_ratio"], 1.0, abs_tol=0.05), "engine and trainer are one network"


@pytest.mark.parametrize(("kind", "bridge"), [("int8", "lora_only"), ("nf4", "lora_only"), ("nf4", "lora_nccl")])
def test_vllm_serves_whole_weights_beside_a_quantized_trainer(kind: str, bridge: str, tmp_path: Path):
    """The base differs by its rounding; the adapter arrives bit for bit, which its digests prove."""
    model = write_model(tmp_path / "model", "qwen2")
    with live(model, tmp_path, bridge={"kind": bridge}, lora=True, base=kind) as (side, policy):
        layers = quantized_layers(policy.transformer)
        assert layers and all(layer.weight.device.type == "cuda" for layer in layers)
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        assert held_bytes(policy.transformer) < 0.8 * whole.get_memory_footprint()
        for version in (1, 2):
            before = side.bridge.engine.canary(CANARY).logprobs
            policy.accumulate(pack(random_groups(groups=2, samples=4, longest=6, seed=version), max_tokens=256))
            with side.bridge.update_to(version):
                policy.step()
            report = side.bridge.last_report
            assert report is not None and report.version == version
            assert report.canary_error is not None and 0 < report.canary_error < QUANTIZED_TOLERANCE[kind]
            after = side.bridge.engine.canary(CANARY).logprobs
            assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.01
