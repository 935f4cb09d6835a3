"""Transformers caches whose rows are picked apart, and layers that grow in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

# Up to here copying the keys and values is cheaper than attention over a tensor with gaps.
_GROW_FROM = 32


class GrowingLayer(DynamicLayer):
    """A full-attention layer [rows, heads, length, dim] with room to grow.

    ``DynamicLayer`` copies all keys and values at every token; this writes the new ones behind the old.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._key_room = _with_room(keys)
        self._value_room = _with_room(values)
        self._show(keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [rows, heads, new, dim]; returns all keys and values."""
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        if stop > self._key_room.shape[2]:
            self._key_room = _with_room(self._key_room[:, :, :start], extra=stop - start)
            self._value_room = _with_room(self._value_room[:, :, :start], extra=stop - start)
        self._key_room[:, :, start:stop] = key_states
        self._value_room[:, :, start:stop] = value_states
        return self._show(stop)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        length = self.get_seq_length()
        self._key_room = _with_room(self._key_room[:, :, :length], rows=beam_idx)
        self._value_room = _with_room(self._value_room[:, :, :length], rows=beam_idx)
        self._show(length)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys = self._key_room[:, :, :length]
        self.values = self._value_room[:, :, :length]
        return self.keys, self.values


def can_pick_rows(cache: object) -> bool:
    """Whether ``reorder_cache`` is known to move all state of this cache: only transformers' own layers are.

    It serves to repeat and to drop rows too, and unlike ``batch_repeat_interleave`` and
    ``batch_select_indices`` recurrent layers have it.
    """
    return type(cache) is DynamicCache and all(
        type(layer).__module__ in (cache_utils.__name__, __name__) for layer in cache.layers
    )


def let_grow(cache: DynamicCache) -> None:
    """Exchange, in place, full-attention layers that have become long for ones that grow in place."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.get_seq_length() >= _GROW_FROM:
            assert layer.keys is not None and layer.values is not None
            cache.layers[i] = GrowingLayer(layer.keys, layer.values)


def _with_room(states: Tensor, *, rows: Tensor | None = None, extra: int = 0) -> Tensor:
    """A copy of ``states`` [rows, heads, length, dim], of the given rows if any, in a longer tensor."""
    count, heads, length, dim = states.shape
    # A quarter more: few copies in all, little memory unused.
    room = length + extra + max(16, length // 4)
    grown = states.new_empty(count if rows is None else rows.numel(), heads, room, dim)
    if rows is None:
        grown[:, :, :length] = states
    else:
        torch.index_select(states, 0, rows, out=grown[:, :, :length])
    return grown
