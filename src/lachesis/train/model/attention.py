"""Attention over packed segments, plugged into transformers' attention interface.

One function serves the whole model: with the packing arguments present it attends segment by segment (each
run of queries to its own keys, causal, aligned at the end); without them, as in generation, it is
transformers' SDPA. On a GPU the segments go to torch's variable-length flash kernel, and a long sequence that is alone
in its pack goes to cuDNN, which is much faster on Hopper; on a CPU they are laid side by side in a few buckets of
similar length.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lachesis.train.batch import MicroBatch
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.context import ContextGroup
from lachesis.train.model.recurrent import RunWays, plan_runs

AttentionKind = Literal["flash", "bucketed", "padded"]
ATTENTION_NAME = "lachesis_packed"
# A bucket may be padded to at most this multiple of its real size before it is cut in two.
_BUCKET_WASTE = 1.3
# Cost of a bucket's kernel launches, in pairs of a query and a key; another bucket must save at least that much.
_BUCKET_COST = 1 << 12
# From this length on a sequence that is alone goes to cuDNN, on GPUs of this compute capability. Lengths are rounded
# up, as cuDNN makes a plan for each one that it has not seen.
_LONG, _CUDNN_CAPABILITY, _CUDNN_MULTIPLE = 4096, (9, 0), 1024
_CUDNN_HEAD_DIM = 128
# The operators of all kernels that may compute attention.
ATTENTION_OPERATORS = (
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)
# Keywords of a whole pass that attention does not use. Any other keyword may change the result.
_OF_THE_PASS = frozenset(
    {
        "position_ids", "cache_position", "use_cache", "past_key_values", "is_causal", "target_dtype",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
        "deterministic", "layer_idx", "position_embeddings", "num_items_in_batch", "seq_idx",
    }
)  # fmt: skip
# The keywords of :func:`packing_arguments`.
_TOLD = frozenset(
    {
        "packed_context", "packed_tokens", "packed_plan", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
        "max_length_k", "packed_key_index", "packed_alone",
    }
)  # fmt: skip
# Newer torch needs an argument for grouped queries; 2.11 detects them.
_VARLEN_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class SegmentBucket:
    """Bucket of B segments of similar length.

    ``q_index`` [B*Q] and ``k_index`` [B*K] are stream positions, padded with 0. ``mask`` is bool [B, 1, Q, K], or
    ``None`` if plain causal attention is the same.
    """

    size: int
    q_index: Tensor
    k_index: Tensor
    mask: Tensor | None

    def to(self, device: torch.device) -> SegmentBucket:
        mask = None if self.mask is None else self.mask.to(device)
        return SegmentBucket(
            size=self.size, q_index=self.q_index.to(device), k_index=self.k_index.to(device), mask=mask
        )


@dataclass(slots=True, eq=False)  # if frozen, torch 2.11 would compile a graph for every number of buckets
class BucketPlan:
    """Buckets of a micro-batch; ``unpad`` [T] finds each stream position in their concatenated output."""

    buckets: tuple[SegmentBucket, ...]
    unpad: Tensor


def install(model: PreTrainedModel) -> None:
    """Make a model use :func:`packed_attention`; it then generates as before and can train on packs."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    for layer in decoder_layers(model):
        inner = getattr(layer, "self_attn", None)
        if inner is not None and _keeps_to_itself(type(layer)) and not hasattr(inner, "told"):
            _hand_on(layer, inner)


@cache
def _keeps_to_itself(layer: type[torch.nn.Module]) -> bool:
    """Return True for a decoder layer that does not pass keyword arguments to its attention (StableLM, Nemotron)."""
    call = re.search(r"self\.self_attn\((.*?)\n\s*\)", inspect.getsource(layer.forward), re.DOTALL)
    return call is not None and "**kwargs" not in call[1]


def _hand_on(layer: torch.nn.Module, inner: Any) -> None:
    """Make a layer pass its keyword arguments to its attention."""
    inner.told = {}

    def hear(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        module.self_attn.told = {name: value for name, value in keywords.items() if name in _TOLD}

    def tell(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return positional, keywords | module.told

    layer.register_forward_pre_hook(hear, with_kwargs=True)
    inner.register_forward_pre_hook(tell, with_kwargs=True)


def packing_arguments(
    micro: MicroBatch, *, kind: AttentionKind, context: ContextGroup | None = None, recurrent: RunWays | None = None
) -> dict[str, Any]:
    """Return the keyword arguments that make a forward pass attend within the micro-batch's segments.

    ``flash`` uses a variable-length kernel (16-bit weights on a GPU), else segments go in buckets. The 4-d attention
    mask is a placeholder: it keeps transformers from building a [T, T] mask. With a ``context`` the pass covers this
    rank's run of the tokens. ``recurrent`` is for a model with recurrent layers.
    """
    placeholder = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=micro.input_ids.device)
    arguments: dict[str, Any] = {"attention_mask": placeholder}
    if context is not None:
        arguments |= {"packed_context": context, "packed_tokens": micro.num_inputs}
    if recurrent is not None:
        arguments["seq_idx"] = plan_runs(micro, ways=recurrent)
    if kind == "bucketed":
        return arguments | {"packed_plan": plan_buckets(micro)}
    return arguments | {
        "cu_seq_lens_q": micro.cu_seq_q,
        "cu_seq_lens_k": micro.cu_seq_k,
        # Rounded up so that layers are not compiled again for each length.
        "max_length_q": _round_up(micro.max_q),
        "max_length_k": _round_up(micro.max_k),
        "packed_key_index": micro.key_index,
        "packed_alone": _is_long_and_alone(micro),
    }


def _is_long_and_alone(micro: MicroBatch) -> bool:
    device = micro.input_ids.device
    alone = micro.cu_seq_q.numel() == 2 and micro.key_index is None and micro.max_q == micro.max_k
    long = alone and micro.max_q >= _LONG
    return long and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CUDNN_CAPABILITY


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_context: ContextGroup | None = None,
    packed_tokens: int = 0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query [1, H, T, D], key and value [1, Hkv, T, D].

    With a ``packed_context`` these cover only a run of the ``packed_tokens``; other arguments are those of
    :func:`packing_arguments` and of the layer.

    Returns the output as [1, T, H, D], and no weights.
    """
    if packed_context is None:
        return _attend(module, query, key, value, attention_mask, **arguments), None
    query, key, value = packed_context.to_heads(query, key, value, tokens=packed_tokens)
    return packed_context.to_tokens(_attend(module, query, key, value, attention_mask, **arguments)), None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_plan: BucketPlan | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    packed_key_index: Tensor | None = None,
    packed_alone: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attend over all tokens of a pass, by the kernel that its arguments ask for; shapes as :func:`packed_attention`.

    Args:
        s_aux: [H], the logit of each head's attention sink.

    Raises:
        ValueError: a layer needs something in a packed pass that the kernel does not do.
    """
    if (packed_plan is not None or cu_seq_lens_q is not None) and (unknown := _unknown(kwargs)):
        raise ValueError(f"packed attention does not support {', '.join(unknown)} of {type(module).__name__}")
    scores: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sinks": s_aux}
    chunk = chunk_size(module)
    if packed_plan is not None:
        return _by_buckets(query, key, value, packed_plan, sliding_window=sliding_window, chunk=chunk, **scores)
    if cu_seq_lens_q is not None:
        missing = {"softcap": softcap, "attention sinks": s_aux, "attention chunks": chunk}
        if lacks := [name for name, value in missing.items() if value is not None]:
            raise ValueError(f"the variable-length kernel does not support {', '.join(lacks)}")
        segments = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        alone = packed_alone and sliding_window is None
        return _by_kernel(
            query, key, value, segments, packed_key_index, scaling=scaling, window=sliding_window, alone=alone
        )
    if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
        raise ValueError(f"{type(module).__name__} does not get the segments of a packed pass")
    if softcap is not None or s_aux is not None:
        return _explicit_attention(query, key, value, attention_mask, **scores)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )[0]


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Any, ...],
    key_index: Tensor | None,
    *,
    scaling: float | None,
    window: int | None,
    alone: bool,
) -> Tensor:
    """Attend within segments by torch's variable-length kernel, or by cuDNN in a long sequence that is ``alone``.

    Args:
        segments: the ends of the segments' queries and keys, and the longest of each.
        key_index: stream positions of the segments' keys; those of the stream in order if ``None``.
        window: keys that a query sees at most; all before it if ``None``.
    """
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention: these kernels take one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    if alone and query.shape[-1] <= _CUDNN_HEAD_DIM:
        return causal_attention(query, key, value, scaling=scaling)[..., :width]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if key_index is not None:
        k, v = k.index_select(0, key_index), v.index_select(0, key_index)
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if _VARLEN_HAS_GQA_FLAG and q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    out = varlen_attn(q, k, v, *segments, scale=scaling, **options)
    assert isinstance(out, Tensor), "the log-sum-exp comes with it only where return_aux asks for it"
    return out.unsqueeze(0)[..., :width]


def _unknown(keywords: Mapping[str, Any]) -> list[str]:
    """Return the names of a layer's keywords that may change what its attention computes."""
    return sorted(n for n, v in keywords.items() if n not in _OF_THE_PASS and v is not None and v is not False)


def chunk_size(module: torch.nn.Module) -> int | None:
    """Return the chunk within which an attention layer attends (Llama 4), or None where it sees all before it.

    transformers builds it into the pass's mask, which a packed pass does not have.
    """
    config: Any = getattr(module, "config", None)
    size, kinds = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", None)
    if size is None or kinds is None:
        return None  # before the layer's number is read, because torch would then compile each layer separately
    index = getattr(module, "layer_idx", None)
    return size if index is not None and index < len(kinds) and kinds[index] == "chunked_attention" else None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
    """Compute causal attention of one sequence by cuDNN, or by flash attention if cuDNN refuses.

    Shapes are as in :func:`packed_attention`. Rows behind the end pad it to a length that cuDNN has a plan for. Nothing
    before them sees them.
    """
    length = query.shape[2]
    filling = (0, 0, 0, _round_up(length, multiple=_CUDNN_MULTIPLE) - length)
    q, k, v = (torch.nn.functional.pad(x, filling) for x in (query, key, value))
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, **grouped)
    return out[:, :, :length].transpose(1, 2)


def bucketed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BucketPlan,
    *,
    scaling: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attend within segments, a bucket of them at a time; shapes as :func:`packed_attention`.

    Args:
        sinks: [H], logits of keys that have no value.
        chunk: number of positions in a chunk; each query sees only the keys of its chunk.
    """
    heads = query.shape[1]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    outputs = []
    for bucket in plan.buckets:
        lay = lambda x, index, b=bucket.size: x.index_select(0, index).unflatten(0, (b, -1)).transpose(1, 2)  # noqa: E731
        q_b, k_b, v_b = lay(q, bucket.q_index), lay(k, bucket.k_index), lay(v, bucket.k_index)
        mask = _narrowed(bucket, q_b.shape[2], k_b.shape[2], window=sliding_window, chunk=chunk)
        if softcap is not None or sinks is not None:
            out = _explicit_attention(q_b, k_b, v_b, mask, scaling=scaling, softcap=softcap, sinks=sinks)
        else:
            out = scaled_dot_product_attention(
                q_b, k_b, v_b, mask, is_causal=mask is None, scale=scaling, enable_gqa=k_b.shape[1] != heads
            ).transpose(1, 2)
        outputs.append(out.reshape(-1, heads, out.shape[-1]))
    stacked = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return stacked.index_select(0, plan.unpad).unsqueeze(0)


# Outside compiled layers: each number of buckets would need a graph, which takes tens of seconds for many buckets.
_by_buckets: Any = torch.compiler.disable(bucketed_attention)


def plan_buckets(micro: MicroBatch) -> BucketPlan:
    """Sort segments by length and divide them into buckets that waste little on padding."""
    device, micro = micro.input_ids.device, micro.to(torch.device("cpu"))
    len_q, len_k = micro.cu_seq_q.diff().long(), micro.cu_seq_k.diff().long()
    buckets, places, start = [], torch.empty(micro.num_inputs, dtype=torch.int64), 0
    for members in _cut(len_q, len_k):
        bucket, valid = _bucket(micro, members, len_q[members], len_k[members])
        places[bucket.q_index[valid]] = start + valid.nonzero().squeeze(1)
        start += bucket.q_index.numel()
        buckets.append(bucket)
    return BucketPlan(buckets=tuple(b.to(device) for b in buckets), unpad=places.to(device))


def _cut(len_q: Tensor, len_k: Tensor) -> list[Tensor]:
    """Divide segments into buckets, sorted by their keys or by their queries, whichever wastes less.

    If prompts are shared, only the first completion of each has its prompt among its queries, so segments with equally
    many keys differ in their queries.
    """
    by_keys = torch.argsort(len_k * (int(len_q.max()) + 1) + len_q, descending=True, stable=True)
    by_queries = torch.argsort(len_q * (int(len_k.max()) + 1) + len_k, descending=True, stable=True)
    ways = [_cut_in_order(order, len_q, len_k) for order in (by_keys, by_queries)]
    cuts, _ = min(ways, key=lambda way: way[1] + len(way[0]) * _BUCKET_COST)
    return cuts


def _cut_in_order(order: Tensor, len_q: Tensor, len_k: Tensor) -> tuple[list[Tensor], int]:
    """Divide where padding to the longest would waste too much; return the parts, and their work with padding."""
    q, k = len_q.tolist(), len_k.tolist()
    cuts, total, first, real, max_q, max_k = [], 0, 0, 0, 0, 0
    ids = order.tolist()
    for i, segment in enumerate(ids):
        real += q[segment] * k[segment]
        wider = max(max_q, q[segment]), max(max_k, k[segment])
        padded = (i - first + 1) * wider[0] * wider[1]
        if i > first and padded > _BUCKET_WASTE * real and padded - real > _BUCKET_COST:
            cuts.append(order[first:i])
            total += (i - first) * max_q * max_k
            first, real, wider = i, q[segment] * k[segment], (q[segment], k[segment])
        max_q, max_k = wider
    return [*cuts, order[first:]], total + (len(ids) - first) * max_q * max_k


def _bucket(micro: MicroBatch, members: Tensor, len_q: Tensor, len_k: Tensor) -> tuple[SegmentBucket, Tensor]:
    """Return one bucket, and which of its query places [B*Q] are real."""
    size, max_q, max_k = members.numel(), int(len_q.max()), int(len_k.max())
    q_place, k_place = torch.arange(max_q), torch.arange(max_k)
    q_valid = q_place < len_q[:, None]
    q_index = (micro.cu_seq_q[members].long()[:, None] + q_place) * q_valid
    k_valid = k_place < len_k[:, None]
    k_index = (micro.cu_seq_k[members].long()[:, None] + k_place) * k_valid
    if micro.key_index is not None:
        k_index = micro.key_index[k_index]
    offset = len_k - len_q
    mask = None
    if bool(offset.any()):
        # Query i of a segment sees the context before the segment and keys up to its own place. A padded
        # query has rows beyond the end: it sees all keys, and is thrown away afterwards.
        mask = (k_place <= (offset[:, None] + q_place)[:, :, None]).unsqueeze(1)
    return SegmentBucket(size=size, q_index=q_index.flatten(), k_index=k_index.flatten(), mask=mask), q_valid.flatten()


def _narrowed(bucket: SegmentBucket, len_q: int, len_k: int, *, window: int | None, chunk: int | None) -> Tensor | None:
    """Return the bucket's mask, narrowed to a sliding window or to chunks where the layer has them."""
    if all(limit is None or len_k <= limit for limit in (window, chunk)):
        return bucket.mask
    device = bucket.q_index.device
    # Each row's own diagonal is its last allowed key.
    if bucket.mask is None:
        last = torch.arange(len_q, device=device)[:, None][None, None]
    else:
        last = bucket.mask.sum(-1, keepdim=True) - 1
    k = torch.arange(len_k, device=device)
    mask = k <= last
    if window is not None:
        mask = mask & (k > last - window)
    return mask if chunk is None else mask & (k // chunk == last // chunk)


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention from explicit scores, squashed by softcap·tanh(s/softcap) (Gemma 2).

    Sinks [H] (gpt-oss) take their share of the softmax and have no value. Returns [B, Q, H, D].
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-1, -2) * (scaling or 1.0 / math.sqrt(query.shape[-1]))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(
            diagonal=scores.shape[-1] - scores.shape[-2]
        )
    # Not -inf: a row of padding sees nothing, and its softmax would be NaN.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.float().softmax(-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2)


def _round_up(length: int, *, multiple: int = 128) -> int:
    return -(-length // multiple) * multiple
