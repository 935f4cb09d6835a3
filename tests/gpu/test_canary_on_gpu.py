"""The trainer's canary as a CUDA graph, and networks that no graph can hold. Not part of `make test`.

PYTHONPATH=src:. python -m pytest tests/gpu/test_canary_on_gpu.py
"""

from __future__ import annotations

import logging

import pytest
import torch

from lachesis.train.canary import CanaryReader
from lachesis.train.model.forward import plan_forward
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")
TOKENS = list(range(20, 32))


def test_a_replayed_graph_reads_the_weights_of_now():
    model = tiny_model("qwen2").cuda()
    reader = CanaryReader(model, plan=plan_forward(model, packing="auto"), device=DEVICE)
    for _ in range(3):
        before = reader.read(TOKENS)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    fresh = CanaryReader(model, plan=plan_forward(model, packing="auto"), device=DEVICE).read(TOKENS)
    assert reader.read(TOKENS) == pytest.approx(fresh, abs=1e-4)
    assert fresh != pytest.approx(before, abs=1e-2)


def test_after_a_capture_that_failed_all_goes_on(caplog: pytest.LogCaptureFixture):
    """torch's generator would stay in the state of capturing, and its allocator would keep what is freed."""
    model = tiny_model("qwen2").cuda()
    plan = plan_forward(model, packing="auto")
    # To look at a number is to wait for the GPU, which a capture forbids.
    model.model.layers[0].register_forward_hook(
        lambda _module, _args, output: output * (1.0 + 0.0 * output.max().item())
    )
    reader = CanaryReader(model, plan=plan, device=DEVICE)
    with caplog.at_level(logging.INFO):
        values = [reader.read(TOKENS) for _ in range(4)]
    assert "without a CUDA graph" in caplog.text
    assert values == [pytest.approx(values[0], abs=1e-4)] * 4
    assert torch.randn(8, device="cuda").isfinite().all()
    held = torch.cuda.memory_reserved()
    large = torch.zeros(1 << 26, device="cuda")
    side = torch.cuda.Stream()
    large.record_stream(side)
    del large
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        noise = torch.randn(8, device="cuda")
    graph.replay()
    first = noise.clone()
    graph.replay()
    assert not torch.equal(first, noise)
