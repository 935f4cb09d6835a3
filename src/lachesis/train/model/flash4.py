"""Attention over packed segments by FlashAttention 4, a separate package with kernels for Hopper and Blackwell.

torch can delegate its variable-length attention to that package, but before 2.12 without the gradients of causal
segments. So the package's two kernels are an operator here, which compiled layers take unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PACKAGE = "flash-attn-4"
# Of GPUs with tensor cores that its kernels are written for: Hopper and Blackwell of the data centre.
_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
# Queries and keys of the segments that are tried: with a context before them and without, within and beyond a tile.
_TRIED = ((5, 5), (140, 333), (1, 64), (270, 270))
# Relative to the norm of the tried result. Weights of 16 bits round results by 0.004 and less.
_MOST_ERROR = 0.02
_LONGEST_MESSAGE = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SHAPES = "Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k, float? scale, SymInt? window"


def refusal(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why FlashAttention 4 cannot be used, or an empty text."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "it takes 16-bit weights on a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability not in _CAPABILITIES:
        return f"it has no kernels for compute capability {'.'.join(map(str, capability))}"
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    return ""


def difference(device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int) -> str:
    """Describe how its results and gradients deviate from the definition; empty if they do not.

    The package is young, and compiles its kernels for a GPU and a shape of heads when they are first used.
    """
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    tokens, keys = (sum(column) for column in zip(*_TRIED, strict=True))
    shapes = (tokens, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, head_dim)
    inputs, upstream = [draw(shape).to(dtype) for shape in shapes], draw(shapes[0]).to(dtype)
    try:
        found = _result_and_gradients(_tried, inputs, upstream)
    except Exception as error:  # whatever a compiler of somebody else's raises
        return f"{type(error).__name__}: {_in_a_line(str(error))}"
    expected = _result_and_gradients(_by_definition, [x.float() for x in inputs], upstream.float())
    for name, one, other in zip(("result", "dq", "dk", "dv"), found, expected, strict=True):
        error = float((one - other).norm() / other.norm())
        if not error < _MOST_ERROR:
            return f"{name} differs by {error:.2g} of its norm, where {_MOST_ERROR} may be"
    return ""


def _in_a_line(message: str) -> str:
    """Shorten a compiler's report, which is pages long and coloured, to one line."""
    words = " ".join(_COLOUR.sub("", message).split())
    return words if len(words) <= _LONGEST_MESSAGE else words[:_LONGEST_MESSAGE] + " ..."


def _result_and_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _tried(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    columns = [*zip(*_TRIED, strict=True)]
    ends = [torch.tensor([0, *accumulate(column)], dtype=torch.int32, device=query.device) for column in columns]
    return flash4(query, key, value, *ends, *map(max, columns), None, None)[0]


def _by_definition(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    lengths, key_lengths = (list(column) for column in zip(*_TRIED, strict=True))
    segments = zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
    parts = []
    for q, k, v in (tuple(part.transpose(0, 1)[None] for part in segment) for segment in segments):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        with sdpa_kernel(SDPBackend.MATH):
            parts.append(scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def _kernels() -> ModuleType:
    """Import the kernels at the first use: it takes seconds, and the package imports on GPUs alone."""
    return import_module("flash_attn.cute.interface")


def _mask(window: int | None) -> dict[str, Any]:
    """Return arguments for a causal mask aligned at the end of the keys, with an optional window of keys per query."""
    if window is None:
        return {"causal": True}
    return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}


@torch.library.custom_op(
    "lachesis::flash4",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_SHAPES}) -> (Tensor, Tensor)",
)
def flash4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of G segments, aligned at their ends.

    Args:
        query: [T, H, D]; key, value: [K, Hkv, D], whose heads divide the queries'.
        cu_seq_q, cu_seq_k: int32 [G+1], where each segment's queries and keys begin and end.
        max_q, max_k: at least the longest of them.
        scale: of the products; 1/sqrt(D) if ``None``.
        window: keys that a query sees at most; all before it if ``None``.

    Returns:
        The output [T, H, D], and float32 [H, T], the log of the sums that the weights were divided by.
    """
    out, lse, *_ = _kernels()._flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=cu_seq_q,
        cu_seqlens_k=cu_seq_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        return_lse=True,
        **_mask(window),
    )
    return out, lse


@flash4.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _dim = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op(
    "lachesis::flash4_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {_SHAPES}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _flash4_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # Rooms of our own, contiguous as the operator's shapes say; the kernel's would be laid out as the inputs are.
    into = {f"d{name}": like.new_empty(like.shape) for name, like in (("q", query), ("k", key), ("v", value))}
    _kernels()._flash_attn_bwd(
        query,
        key,
        value,
        out,
        grad.contiguous(),
        lse,
        softmax_scale=scale,
        cu_seqlens_q=cu_seq_q,
        cu_seqlens_k=cu_seq_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **into,
        **_mask(window),
    )
    return into["dq"], into["dk"], into["dv"]


@_flash4_backward.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _of_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, cu_seq_q, cu_seq_k, out, lse = ctx.saved_tensors
    grads = _flash4_backward(
        grad, query, key, value, out, lse, cu_seq_q, cu_seq_k, ctx.max_q, ctx.max_k, ctx.scale, ctx.window
    )
    return (*grads, *(None,) * 6)


flash4.register_autograd(_differentiate, setup_context=_keep)
