"""Agreement of both sides of a channel before tensors travel: which ones, and where they lie in flat buffers.

No torch. No torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lachesis.common.errors import EngineError
from lachesis.common.json_values import is_list

ChannelBackend = Literal["nccl", "gloo", "ipc"]
Staging = Literal["auto", "device", "host"]
"""Place where an engine keeps an update until it is complete: on its device, in the host's memory, or (``auto``) on the
device if there is room."""

BUCKET_BYTES = 256 * 2**20
# The number of full buckets in flight: enough that the wire, the copies at its ends and the messages do not wait for
# each other.
WINDOW = 4
# Every tensor starts at a multiple of this, so that a buffer of bytes can be viewed as any dtype there.
_ALIGNMENT = 256
_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}


@dataclass(frozen=True, slots=True)
class ReceivedTensor:
    """Tensor that comes over a channel, under its name in the trainer (peft's or Hugging Face's)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Tensor and its place in its bucket, in bytes."""

    tensor: ReceivedTensor
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together in one flat buffer of ``num_bytes``.

    The bucket lies at ``place`` of the ring into which the buckets of an update are packed one after the other, once
    the first ``after`` of them have been taken.
    """

    tensors: tuple[PackedTensor, ...]
    num_bytes: int
    place: int = 0
    after: int = 0


def plan_buckets(tensors: Sequence[ReceivedTensor], *, limit_bytes: int, window: int = 1) -> tuple[Bucket, ...]:
    """Fill buckets of up to ``limit_bytes`` in the order of ``tensors``; a larger tensor has a bucket to itself.

    Their ring has room for ``window`` full ones, or for the largest.

    Raises:
        EngineError: a dtype that no channel carries, or a name that occurs twice.
    """
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        twice = next(t.name for i, t in enumerate(tensors) if t.name in {u.name for u in tensors[:i]})
        raise EngineError(f"the tensor {twice!r} occurs twice in one update", remedy="send each tensor once")
    buckets: list[Bucket] = []
    packed: list[PackedTensor] = []
    end = 0
    for tensor in tensors:
        size = num_bytes(tensor)
        if packed and end + size > limit_bytes:
            buckets.append(Bucket(tuple(packed), end))
            packed, end = [], 0
        packed.append(PackedTensor(tensor, offset=end, num_bytes=size))
        end += _aligned(size)
    if packed:
        buckets.append(Bucket(tuple(packed), end))
    largest = max((bucket.num_bytes for bucket in buckets), default=0)
    return _placed(buckets, ring=max(largest, window * _aligned(limit_bytes)))


def ring_bytes(buckets: Sequence[Bucket]) -> int:
    """Return the size in bytes of the ring in which the buckets have their places."""
    return max((bucket.place + bucket.num_bytes for bucket in buckets), default=0)


def _placed(buckets: Sequence[Bucket], *, ring: int) -> tuple[Bucket, ...]:
    """Return the buckets, each placed where the one before ends, or at the beginning of the ring.

    Earlier contents must have been taken by then.
    """
    placed: list[Bucket] = []
    held: deque[tuple[int, Bucket]] = deque()
    end = after = 0
    for number, bucket in enumerate(buckets):
        place = end if end + bucket.num_bytes <= ring else 0
        end = place + bucket.num_bytes
        while any(place < other.place + other.num_bytes and other.place < end for _, other in held):
            after = held.popleft()[0] + 1
        placed.append(replace(bucket, place=place, after=after))
        held.append((number, placed[-1]))
    return tuple(placed)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def num_bytes(tensor: ReceivedTensor) -> int:
    """Return the size of the tensor's elements in bytes.

    Raises EngineError for a dtype that no channel carries.
    """
    if tensor.dtype not in _ITEM_BYTES:
        raise EngineError(
            f"the tensor {tensor.name!r} has dtype {tensor.dtype!r}, which a weight channel cannot carry",
            remedy=f"convert it to one of {', '.join(sorted(_ITEM_BYTES))}",
        )
    return math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]


def to_wire(tensors: Sequence[ReceivedTensor]) -> list[list[Any]]:
    """Return name, shape and dtype of each tensor, as JSON."""
    return [[tensor.name, list(tensor.shape), tensor.dtype] for tensor in tensors]


def difference(ours: Sequence[ReceivedTensor], theirs: object) -> str | None:
    """Describe how ``theirs`` (announced by the trainer) differs from the expected layout; None if both agree."""
    expected = to_wire(ours)
    if theirs == expected:
        return None
    if not is_list(theirs):
        return "the trainer's list of tensors cannot be read"
    for mine, other in zip(expected, theirs, strict=False):
        if mine != other:
            return f"the engine expects {_brief(mine)} where the trainer sends {_brief(other)}"
    return f"the engine expects {len(expected)} tensors, but the trainer sends {len(theirs)}"


def _brief(entry: object) -> str:
    if is_list(entry) and [type(part) for part in entry] == [str, list, str]:
        name, shape, dtype = entry
        return f"{name} {shape} {dtype}"
    return repr(entry)[:200]
