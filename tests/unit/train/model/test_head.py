"""The chunked head against log_softmax on whole logits, values and gradients."""

from __future__ import annotations

import pytest
import torch

from lachesis.train.model import head
from lachesis.train.model.head import logprobs_from_logits, token_logprobs


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [0.0, 1.0])
@pytest.mark.parametrize("kept_rows", [0, 4, 8])
def test_values_and_gradients_equal_those_of_whole_logits(softcap, with_bias, entropy, kept_rows, monkeypatch):
    monkeypatch.setitem(head._CHUNK_ELEMENTS, "cpu", 3 * 11)  # chunks of three rows
    monkeypatch.setitem(head._KEPT_ELEMENTS, "cpu", kept_rows * 11)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    hidden, weight, bias = draw(8, 5), draw(11, 5), draw(11) if with_bias else None
    targets = torch.randint(0, 11, (8,), generator=generator)
    inverse_temperature = torch.linspace(0.5, 2.0, 8)
    upstream = torch.randn(2, 8, generator=generator, dtype=torch.float64)

    def loss(logprobs, entropies):
        terms = upstream[0] * logprobs
        return (terms + entropy * upstream[1] * entropies if entropy else terms).sum()

    leaves = [hidden, weight] + ([bias] if bias is not None else [])
    found = token_logprobs(hidden, weight, targets, inverse_temperature, bias=bias, softcap=softcap)
    ours = torch.autograd.grad(loss(found.logprobs, found.entropies), leaves)

    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits * inverse_temperature[:, None]).log_softmax(-1)
    logprobs, entropies = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    theirs = torch.autograd.grad(loss(logprobs, entropies), leaves)

    torch.testing.assert_close(found.logprobs, logprobs)
    torch.testing.assert_close(found.entropies, entropies)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


@pytest.mark.parametrize("entropy", [False, True])
def test_logits_are_computed_again_only_for_what_is_not_kept(entropy, monkeypatch):
    monkeypatch.setitem(head._CHUNK_ELEMENTS, "cpu", 2 * 7)
    monkeypatch.setitem(head._KEPT_ELEMENTS, "cpu", 5 * 7)  # the first four of six rows, in whole chunks
    rows = []
    logits = head._logits
    monkeypatch.setattr(head, "_logits", lambda hidden, *rest: rows.append(len(hidden)) or logits(hidden, *rest))
    hidden, weight = torch.randn(6, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    found = token_logprobs(hidden, weight, torch.arange(6), torch.ones(6))
    assert rows == [2, 2, 2]
    (found.logprobs.sum() + (found.entropies.sum() if entropy else 0)).backward()
    assert rows[3:] == ([2, 2, 2] if entropy else [2])


def test_a_model_that_spares_memory_keeps_no_derivatives(monkeypatch):
    rows = []
    logits = head._logits
    monkeypatch.setattr(head, "_logits", lambda hidden, *rest: rows.append(len(hidden)) or logits(hidden, *rest))
    hidden, weight = torch.randn(6, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    token_logprobs(hidden, weight, torch.arange(6), torch.ones(6), keep=False).logprobs.sum().backward()
    assert rows == [6, 6]


def test_no_derivatives_are_made_where_nothing_learns(monkeypatch):
    monkeypatch.setattr(head, "_chunk_functions", lambda _: head._ChunkFunctions(head._chunk_forward, None, None))
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3)
    with torch.no_grad():
        token_logprobs(hidden, weight, torch.arange(4), torch.ones(4))


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
