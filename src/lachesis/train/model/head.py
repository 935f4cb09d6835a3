"""The LM head without a logits tensor: logprobs and entropies of chosen tokens, a chunk at a time.

Only hidden states that predict a completion token go through the head. The forward pass keeps nothing but
the hidden states; the backward pass computes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits of one chunk in float32 take at most this many elements (512 MiB on GPU, 64 MiB on CPU).
_CHUNK_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 24}


Logits = Callable[[Tensor, Tensor], Tensor]
"""From what a model gives of C predictions [C, ·] and inverse temperatures [C]: logits / temperature [C, V]."""

Read = Callable[[Tensor, slice], Tensor]
"""From log-probabilities [C, V] of the predictions in a slice to something of each of them, [C, ...]."""


class TokenLogprobs(NamedTuple):
    """``logprobs`` [M] of the targets and ``entropies`` [M] of their distributions, both at temperature.

    ``read`` [M, ...] is what a :data:`Read` made of the distributions, where one was asked for.
    """

    logprobs: Tensor
    entropies: Tensor
    read: Tensor | None = None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inverse_temperature: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> TokenLogprobs:
    """log-softmax(logits / temperature) at the targets, and the entropy of the same distribution.

    Args:
        hidden: [M, H] hidden states.
        weight: [V, H] of the head.
        targets: int64 [M].
        inverse_temperature: float32 [M].
        bias: [V].
        softcap: logits are softcap·tanh(logits / softcap) where the architecture does so (Gemma 2).

    Differentiable in hidden, weight and bias, through both results.
    """
    return TokenLogprobs(*_ChunkedHead.apply(hidden, weight, bias, targets, inverse_temperature, softcap))


def logprobs_from_logits(logits: Tensor, targets: Tensor, inverse_temperature: Tensor) -> TokenLogprobs:
    """The same from logits [M, V], for heads that only their model can compute."""
    scaled = logits.float() * inverse_temperature[:, None]
    log_p = scaled.log_softmax(-1)
    return TokenLogprobs(
        logprobs=log_p.gather(1, targets[:, None]).squeeze(1), entropies=-(log_p.exp() * log_p).sum(-1)
    )


def logits_of_head(weight: Tensor, *, bias: Tensor | None, softcap: float | None) -> Logits:
    """Logits of hidden states [C, H], by a head of ``weight`` [V, H] and ``bias`` [V]."""
    return lambda hidden, inverse_temperature: _logits(hidden, weight, bias, inverse_temperature, softcap)


def scaled_logits(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Logits [C, V] that their model has computed itself, over the temperature."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide * inverse_temperature[:, None]


def read_distributions(
    values: Tensor, inverse_temperature: Tensor, *, logits: Logits, read: Read, vocab: int
) -> Tensor:
    """What ``read`` makes of the distributions, chunk by chunk; the backward pass computes each chunk's logits again.

    Args:
        values: [M, ·], as ``logits`` takes them.
        inverse_temperature: float32 [M].
        vocab: V, by which chunks are as large as those of the other results.

    Returns:
        [M, ...], differentiable in the values and in what ``logits`` holds.
    """

    def of_chunk(part: Tensor, chunk: slice) -> Tensor:
        return read(logits(part, inverse_temperature[chunk]).log_softmax(-1), chunk)

    parts = [
        checkpoint(of_chunk, values[c], c, use_reentrant=False, preserve_rng_state=False)
        for c in _chunks(values.shape[0], vocab, values.device)
    ]
    return torch.cat(parts) if parts else values.new_zeros(0)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        forward, _ = _chunk_functions(hidden.device.type)
        parts = [
            forward(hidden[c], weight, bias, targets[c], inverse_temperature[c], softcap)
            for c in _chunks(hidden.shape[0], weight.shape[0], weight.device)
        ]
        logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, inverse_temperature, entropies)
        ctx.softcap = softcap
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse_temperature, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        _, backward = _chunk_functions(hidden.device.type)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=_sum_dtype(bias)) if need_bias else None
        for c in _chunks(hidden.shape[0], weight.shape[0], weight.device):
            grad_logits = backward(
                hidden[c],
                weight,
                bias,
                targets[c],
                inverse_temperature[c],
                ctx.softcap,
                entropies[c],
                None if grad_logprobs is None else grad_logprobs[c],
                None if grad_entropies is None else grad_entropies[c],
            )
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[c])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[c]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=grad_bias.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: Tensor, softcap: float | None
) -> Tensor:
    """float32 (or float64) logits / temperature [C, V]."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        # The products are added up in float32 anyway: rounding the sums to 16 bits would only cost precision.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        logits = logits if bias is None else logits + bias
    else:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits * inverse_temperature[:, None]


def _chunk_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [C] of one chunk. H(p) = logsumexp(z) - Σ p·z."""
    z = _logits(hidden, weight, bias, inverse_temperature, softcap)
    normalizer = z.logsumexp(-1)
    probabilities = (z - normalizer[:, None]).exp()
    entropies = normalizer - (probabilities * z).sum(-1)
    return z.gather(1, targets[:, None]).squeeze(1) - normalizer, entropies


def _chunk_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    softcap: float | None,
    entropies: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
) -> Tensor:
    """Gradient [C, V] with respect to the head's raw logits, in the head's dtype.

    ∂logp(y)/∂z = onehot(y) - p and ∂H/∂z = -p·(log p + H), with z the logits after temperature.
    """
    z = _logits(hidden, weight, bias, inverse_temperature, softcap)
    log_p = z - z.logsumexp(-1, keepdim=True)
    p = log_p.exp()
    grad = torch.zeros_like(p)
    if grad_logprobs is not None:
        onehot = torch.arange(p.shape[1], device=p.device)[None, :] == targets[:, None]
        grad = grad_logprobs[:, None] * (onehot.to(p.dtype) - p)
    if grad_entropies is not None:
        grad = grad - grad_entropies[:, None] * p * (log_p + entropies[:, None])
    grad = grad * inverse_temperature[:, None]
    if softcap is not None:
        capped = z / (inverse_temperature[:, None] * softcap)
        grad = grad * (1.0 - capped * capped)
    return grad.to(hidden.dtype)


def _sum_dtype(weight: Tensor) -> torch.dtype:
    """At least float32: a 16-bit sum loses what a chunk adds."""
    return torch.promote_types(weight.dtype, torch.float32)


def _chunks(rows: int, vocab: int, device: torch.device) -> list[slice]:
    elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cpu"])
    size = max(1, elements // vocab)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@cache
def _chunk_functions(device_type: str) -> tuple[Any, Any]:
    """On a GPU each chunk's elementwise work is compiled into a few kernels; a CPU runs it as it stands."""
    if device_type != "cuda":
        return _chunk_forward, _chunk_backward
    return torch.compile(_chunk_forward, dynamic=True), torch.compile(_chunk_backward, dynamic=True)
