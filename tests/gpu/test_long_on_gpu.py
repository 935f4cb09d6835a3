"""Long sequences on a real GPU: cuDNN's attention, layers that keep its results alone, inputs that are offloaded.

PYTHONPATH=src python -m pytest tests/gpu
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lachesis.train.batch import MicroBatch, plain_micro_batch
from lachesis.train.distributed.strategy import SingleDevice
from lachesis.train.model import attention
from lachesis.train.model.activations import keep_activations
from lachesis.train.model.forward import plan_forward, target_logprobs
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < attention._CUDNN_CAPABILITY,
    reason="needs a GPU for which cuDNN has a fast attention",
)


def long_sequence(length: int) -> MicroBatch:
    return plain_micro_batch([(5 * i * i + 3 * i) % 30 for i in range(length)]).to(torch.device("cuda"))


def learn(model, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """Logprobs, the gradient of the embeddings, and the names of the kernels that ran."""
    plan = plan_forward(model, packing="packed")
    weight = model.get_input_embeddings().weight
    weight.grad = None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        logprobs = target_logprobs(model, micro, plan=plan).logprobs
        logprobs.sum().backward()
    return logprobs.detach().float(), weight.grad.float(), {event.name for event in seen.events()}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_long_sequence_goes_to_cudnn_and_a_short_one_does_not(monkeypatch):
    model = tiny_model("qwen3", initializer_range=0.1).to("cuda", torch.bfloat16)
    micro = long_sequence(attention._LONG + 100)
    logprobs, gradient, kernels = learn(model, micro)
    assert any("cudnn" in name for name in kernels)
    monkeypatch.setattr(attention, "_LONG", 1 << 30)
    expected, expected_gradient, kernels = learn(model, micro)
    assert not any("cudnn" in name for name in kernels)
    assert any("pytorch_flash" in name for name in kernels)
    assert relative(logprobs, expected) < 0.01
    assert relative(gradient, expected_gradient) < 0.03


@pytest.mark.parametrize("length", [300, attention._LONG + 100])
def test_selective_layers_learn_the_same_and_run_attention_once(length):
    micro, model = long_sequence(length), tiny_model("qwen3", initializer_range=0.1).to("cuda", torch.bfloat16)
    logprobs, gradient, _ = learn(model, micro)
    keep_activations(model, "selective")
    model.train()
    SingleDevice().compile(model)
    found, found_gradient, kernels = learn(model, micro)
    assert relative(found, logprobs) < 0.01
    assert relative(found_gradient, gradient) < 0.03
    assert any("flash" in name or "cudnn" in name for name in kernels)


@pytest.mark.parametrize("compiled", [False, True])
def test_offloaded_inputs_learn_the_same_in_the_memory_of_two(compiled):
    layers, length = 8, 1 << 16
    micro, found = long_sequence(length), {}
    for which in ("recompute", "offload"):
        model = tiny_model("qwen3", num_hidden_layers=layers, hidden_size=256, initializer_range=0.1)
        model = model.to("cuda", torch.bfloat16).train()
        keep_activations(model, which)
        if compiled:
            SingleDevice().compile(model)
        learn(model, micro)  # what compiling takes is no memory of a step
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs, gradient, kernels = learn(model, micro)
        found[which] = logprobs, gradient, torch.cuda.max_memory_allocated() - before
        assert any("Memcpy DtoH" in name for name in kernels) == (which == "offload")
        torch.compiler.reset()
    (logprobs, gradient, less), (expected, expected_gradient, more) = found["offload"], found["recompute"]
    assert torch.equal(logprobs, expected)
    # The kernels of the backward pass add in an order of their own each time.
    assert relative(gradient, expected_gradient) < 0.01
    assert more - less > (layers - 3) * length * 256 * 2
