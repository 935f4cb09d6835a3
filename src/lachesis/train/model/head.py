"""LM head without a float32 logits tensor: logprobs and entropies of chosen tokens, a chunk at a time.

Only hidden states that predict a completion token go through the head. The gradient of a token's logits is
g·∂logprob/∂logits; only g, the loss's gradient of the logprob, is unknown in the forward pass. The gradient of the
hidden states is therefore computed there up to the factor g, and the backward pass computes no logits again. The
gradient of the head's weight needs the derivatives themselves, which are kept in the weights' dtype up to a limit, and
recomputed beyond it. A loss with a gradient in the entropies, such as an entropy bonus, has each chunk's logits
computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lachesis.train.model.compilation import compiler_arguments

# Logits of one chunk in float32 take at most this many elements (512 MiB on GPU, 64 MiB on CPU).
_CHUNK_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 24}
# Derivatives that are kept for the head's weight: 8,192 tokens of 152,000 entries in 16 bits are 2.5 GB.
_KEPT_ELEMENTS = {"cuda": 5 << 28, "cpu": 1 << 26}


Logits = Callable[[Tensor, Tensor], Tensor]
"""Map a model's output for C predictions [C, ·] and inverse temperatures [C] to logits / temperature [C, V]."""

Read = Callable[[Tensor, slice], Tensor]
"""Map log-probabilities [C, V] of the predictions in a slice to a result for each, [C, ...]."""


class TokenLogprobs(NamedTuple):
    """Logprobs [M] of the targets and entropies [M] of their distributions, both at temperature.

    ``read`` [M, ...] is the result of a :data:`Read`, if one was given.
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
    keep: bool = True,
) -> TokenLogprobs:
    """Return log-softmax(logits / temperature) at the targets, and the entropy of the same distribution.

    Args:
        hidden: [M, H] hidden states.
        weight: [V, H] of the head.
        targets: int64 [M].
        inverse_temperature: float32 [M].
        bias: [V].
        softcap: logits are softcap·tanh(logits / softcap) where the architecture does so (Gemma 2).
        keep: keep the derivatives for the weight's gradient, up to 2.7 GB on a GPU, or recompute them.

    Differentiable in hidden, weight and bias, through both results.
    """
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    return TokenLogprobs(*_ChunkedHead.apply(hidden, weight, bias, targets, inverse_temperature, softcap, learns, keep))


def logprobs_from_logits(logits: Tensor, targets: Tensor, inverse_temperature: Tensor) -> TokenLogprobs:
    """Return logprobs and entropies from logits [M, V], for heads that only their model can compute."""
    scaled = logits.float() * inverse_temperature[:, None]
    log_p = scaled.log_softmax(-1)
    return TokenLogprobs(
        logprobs=log_p.gather(1, targets[:, None]).squeeze(1), entropies=-(log_p.exp() * log_p).sum(-1)
    )


def logits_of_head(weight: Tensor, *, bias: Tensor | None, softcap: float | None) -> Logits:
    """Return a function to the logits of hidden states [C, H], by a head of ``weight`` [V, H] and ``bias`` [V]."""
    return lambda hidden, inverse_temperature: _logits(hidden, weight, bias, inverse_temperature, softcap)


def scaled_logits(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Divide logits [C, V] that their model has computed itself by the temperature."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide * inverse_temperature[:, None]


def read_distributions(
    values: Tensor, inverse_temperature: Tensor, *, logits: Logits, read: Read, vocab: int
) -> Tensor:
    """Return the results of ``read`` on the distributions, chunk by chunk.

    The backward pass computes each chunk's logits again.

    Args:
        values: [M, ·], as ``logits`` takes them.
        inverse_temperature: float32 [M].
        vocab: V, for chunks as large as those of the other results.

    Returns:
        [M, ...], differentiable in the values and in the tensors that ``logits`` holds.
    """

    def of_chunk(part: Tensor, chunk: slice) -> Tensor:
        return read(logits(part, inverse_temperature[chunk]).log_softmax(-1), chunk)

    parts = [
        checkpoint(of_chunk, values[c], c, use_reentrant=False, preserve_rng_state=False)
        for c in _chunks(values.shape[0], vocab, values.device)
    ]
    return torch.cat(parts)


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
        learns: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        kernels = _chunk_functions(hidden.device.type)
        rows, vocab = hidden.shape[0], weight.shape[0]
        to_hidden = torch.empty_like(hidden) if learns else None
        of_weight = learns and keep and any(ctx.needs_input_grad[1:3])
        kept = hidden.new_empty(_kept_rows(rows, vocab, hidden.device) if of_weight else 0, vocab)
        parts = []
        for c in _chunks(rows, vocab, weight.device):
            inputs = hidden[c], weight, bias, targets[c], inverse_temperature[c], softcap
            if to_hidden is None:
                parts.append(kernels.forward(*inputs))
                continue
            into = kept[c] if c.stop <= kept.shape[0] else hidden.new_empty(c.stop - c.start, vocab)
            parts.append(kernels.forward_and_derivative(*inputs, into))
            torch.mm(into, weight, out=to_hidden[c])
        logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, inverse_temperature, entropies, to_hidden, kept)
        ctx.softcap = softcap
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 8
        if grad_logprobs is not None and grad_entropies is None:
            sums, done = _from_derivatives(ctx, grad_logprobs)
        else:
            sums, done = _HeadGradients(*map(_zeros, ctx.saved_tensors[:3], ctx.needs_input_grad[:3])), 0
        _recompute(ctx, grad_logprobs, grad_entropies, sums, start=done)
        rounded = (
            None if total is None else total.to(like.dtype)
            for total, like in zip(sums, ctx.saved_tensors[:3], strict=True)
        )
        return (*rounded, *(None,) * 5)


class _HeadGradients(NamedTuple):
    """Gradients of ``hidden`` [M, H] and, summed in at least float32, ``weight`` [V, H] and ``bias`` [V], if needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _zeros(like: Tensor | None, needed: bool) -> Tensor | None:
    if not needed or like is None:
        return None
    # A 16-bit sum would lose what a chunk adds.
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _from_derivatives(ctx: Any, grad_logprobs: Tensor) -> tuple[_HeadGradients, int]:
    """Return the gradients as far as the forward pass has kept their derivatives, and the number of complete rows."""
    hidden, weight, bias, *_, to_hidden, kept = ctx.saved_tensors
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    upstream, rows = grad_logprobs[:, None], kept.shape[0]
    sums = _HeadGradients(
        hidden=upstream * to_hidden if need_hidden else None,
        weight=_product(kept.t(), (upstream * hidden)[:rows]) if need_weight and rows else _zeros(weight, need_weight),
        bias=_product(upstream[:rows].t(), kept).squeeze(0) if need_bias and rows else _zeros(bias, need_bias),
    )
    return sums, rows if need_weight or need_bias else hidden.shape[0]


def _recompute(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, sums: _HeadGradients, *, start: int
) -> None:
    """Add the rows from ``start`` on, whose logits are computed again.

    Gradients of the hidden states are added only if entropies have a gradient; otherwise the forward pass made them.
    """
    hidden, weight, bias, targets, inverse_temperature, entropies, *_ = ctx.saved_tensors
    backward = _chunk_functions(hidden.device.type).backward
    for c in _chunks(hidden.shape[0], weight.shape[0], weight.device):
        if c.stop <= start:
            continue
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
        if sums.hidden is not None and grad_entropies is not None:
            sums.hidden[c] = grad_logits @ weight
        if sums.weight is not None:
            sums.weight.add_(grad_logits.t() @ hidden[c])
        if sums.bias is not None:
            sums.bias.add_(grad_logits.sum(0, dtype=sums.bias.dtype))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: Tensor, softcap: float | None
) -> Tensor:
    """Return float32 (or float64) logits / temperature [C, V]."""
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
    """Return logprobs and entropies [C] of one chunk. H(p) = logsumexp(z) - Σ p·z."""
    z = _logits(hidden, weight, bias, inverse_temperature, softcap)
    normalizer = z.logsumexp(-1)
    probabilities = (z - normalizer[:, None]).exp()
    entropies = normalizer - (probabilities * z).sum(-1)
    return z.gather(1, targets[:, None]).squeeze(1) - normalizer, entropies


def _chunk_forward_and_derivative(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    softcap: float | None,
    derivative: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run :func:`_chunk_forward`, and write ∂logprob/∂(raw logits) [C, V] into ``derivative``."""
    z = _logits(hidden, weight, bias, inverse_temperature, softcap)
    normalizer = z.logsumexp(-1)
    p = (z - normalizer[:, None]).exp()
    entropies = normalizer - (p * z).sum(-1)
    onehot = torch.arange(p.shape[1], device=p.device)[None, :] == targets[:, None]
    derivative.copy_(_of_raw_logits(onehot.to(p.dtype) - p, z, inverse_temperature, softcap))
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
    """Return the gradient [C, V] with respect to the head's raw logits, in the head's dtype.

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
    return _of_raw_logits(grad, z, inverse_temperature, softcap).to(hidden.dtype)


def _of_raw_logits(grad: Tensor, z: Tensor, inverse_temperature: Tensor, softcap: float | None) -> Tensor:
    """Convert a gradient with respect to z, the logits after softcap and temperature, to that of the raw logits.

    Shapes are [C, V].
    """
    grad = grad * inverse_temperature[:, None]
    if softcap is None:
        return grad
    capped = z / (inverse_temperature[:, None] * softcap)
    return grad * (1.0 - capped * capped)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the narrower dtype of the two, with sums in at least float32 if the device offers them."""
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    a, b = a.to(dtype), b.to(dtype)
    if a.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(torch.promote_types(dtype, torch.float32))


def _chunks(rows: int, vocab: int, device: torch.device) -> list[slice]:
    elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cpu"])
    size = max(1, elements // vocab)
    # At least one chunk, because no rows too need a result and a gradient.
    return [slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


def _kept_rows(rows: int, vocab: int, device: torch.device) -> int:
    """Return for how many rows derivatives are kept: all, or whole chunks up to the limit."""
    limit = _KEPT_ELEMENTS.get(device.type, _KEPT_ELEMENTS["cpu"]) // vocab
    return rows if rows <= limit else max((c.stop for c in _chunks(rows, vocab, device) if c.stop <= limit), default=0)


class _ChunkFunctions(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor]]
    forward_and_derivative: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor]


@cache
def _chunk_functions(device_type: str) -> _ChunkFunctions:
    """Return the functions of a chunk: compiled into a few kernels on a GPU, plain on a CPU."""
    made = partial(torch.compile, **compiler_arguments()) if device_type == "cuda" else lambda function: function
    return _ChunkFunctions(
        forward=made(_chunk_forward),
        forward_and_derivative=made(_chunk_forward_and_derivative),
        backward=made(_chunk_backward),
    )
