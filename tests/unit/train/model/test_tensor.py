"""What ranks that share matrices deal out; that they then learn as one is in `tests/ranks_program.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lachesis.common.errors import ModelError
from lachesis.train.model import tensor
from lachesis.train.model.forward import plan_forward
from lachesis.train.model.tensor import TensorGroup, scale_gradient
from tests.tiny import tiny_model

NOBODY: Any = None


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_each_prediction_is_one_ranks_share(monkeypatch: pytest.MonkeyPatch, count: int):
    """Of those 10 to 10 + count of a micro-batch."""
    monkeypatch.setattr(tensor, "_enter", lambda states, group: states)
    values = torch.arange(float(count))[:, None]
    dealt = [TensorGroup(rank, 3, NOBODY).deal(values, slice(10, 10 + count)) for rank in range(3)]
    assert torch.equal(torch.cat([own for own, _ in dealt]), values)
    numbers = torch.arange(100)
    assert torch.equal(torch.cat([numbers[places] for _, places in dealt]), numbers[10 : 10 + count])


def test_a_gradient_is_scaled_and_a_value_is_not():
    values = torch.ones(3, requires_grad=True)
    scaled = scale_gradient(values, 0.25)
    scaled.sum().backward()
    assert torch.equal(scaled, torch.ones(3))
    assert torch.equal(values.grad, torch.full((3,), 0.25))


def test_a_head_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Granite divides its logits by a number that its head's weight does not know."""
    for function in ("_enter", "_leave"):
        monkeypatch.setattr(tensor, function, lambda states, group: states)
    monkeypatch.setattr(TensorGroup, "gather", lambda self, own, *, total: own)
    with pytest.raises(ModelError, match="GraniteForCausalLM cannot be trained by devices that share") as caught:
        plan_forward(tiny_model("granite"), packing="auto", tensor=TensorGroup(0, 1, NOBODY))
    assert "tensor_parallel_size" in caught.value.remedy
