"""The chunked head against log_softmax on whole logits, values and gradients."""

from __future__ import annotations

import pytest
import torch

from lachesis.train.model import head
from lachesis.train.model.head import logprobs_from_logits, token_logprobs


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_those_of_whole_logits(softcap, with_bias, monkeypatch):
    monkeypatch.setitem(head._CHUNK_ELEMENTS, "cpu", 3 * 11)  # chunks of three rows
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    hidden, weight, bias = draw(8, 5), draw(11, 5), draw(11) if with_bias else None
    targets = torch.randint(0, 11, (8,), generator=generator)
    inverse_temperature = torch.linspace(0.5, 2.0, 8)
    upstream = torch.randn(2, 8, generator=generator, dtype=torch.float64)

    def loss(found):
        return (upstream[0] * found.logprobs + upstream[1] * found.entropies).sum()

    leaves = [hidden, weight] + ([bias] if bias is not None else [])
    found = token_logprobs(hidden, weight, targets, inverse_temperature, bias=bias, softcap=softcap)
    ours = torch.autograd.grad(loss(found), leaves)

    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits * inverse_temperature[:, None]).log_softmax(-1)
    logprobs, entropies = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    theirs = torch.autograd.grad((upstream[0] * logprobs + upstream[1] * entropies).sum(), leaves)

    torch.testing.assert_close(found.logprobs, logprobs)
    torch.testing.assert_close(found.entropies, entropies)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


def test_frozen_head_gets_no_gradient_and_passes_it_on():
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(7, 3)
    token_logprobs(hidden, weight, torch.tensor([0, 1, 2, 3]), torch.ones(4)).logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0 and weight.grad is None


def test_from_logits_is_the_same():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 3), torch.randn(7, 3)
    targets, inverse_temperature = torch.tensor([0, 6, 2, 3]), torch.tensor([1.0, 2.0, 0.5, 1.0])
    ours = token_logprobs(hidden, weight, targets, inverse_temperature)
    other = logprobs_from_logits(hidden @ weight.t(), targets, inverse_temperature)
    torch.testing.assert_close(ours.logprobs, other.logprobs)
    torch.testing.assert_close(ours.entropies, other.entropies)
