"""Layers that grow in place hold what transformers' own layers hold."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from lachesis.engines.embedded.kv_cache import GrowingLayer, can_pick_rows, let_grow


def states(rows: int, length: int, *, seed: int) -> torch.Tensor:
    return torch.randn(rows, 2, length, 4, generator=torch.Generator().manual_seed(seed))


def filled(length: int) -> DynamicCache:
    cache = DynamicCache()
    cache.update(states(3, length, seed=0), states(3, length, seed=1), layer_idx=0)
    return cache


def test_a_grown_layer_holds_what_a_dynamic_one_does_through_growth_and_reordering():
    plain, grown = filled(40), filled(40)
    let_grow(grown)
    assert isinstance(grown.layers[0], GrowingLayer)
    rows, new_rows = torch.tensor([2, 0, 0, 1]), 3
    for round_, length in enumerate([1, 30, 1, 100]):
        for cache in (plain, grown):
            new = states(new_rows, length, seed=round_)
            keys, values = cache.update(new, new + 1, layer_idx=0)
        torch.testing.assert_close((keys, values), (plain.layers[0].keys, plain.layers[0].values), rtol=0, atol=0)
        if round_ == 1:
            plain.reorder_cache(rows)
            grown.reorder_cache(rows)
            new_rows = 4
        assert grown.get_seq_length() == plain.get_seq_length()


def test_growing_writes_behind_the_old_states_instead_of_copying_them():
    cache = filled(40)
    let_grow(cache)
    before = cache.layers[0].keys.data_ptr()
    cache.update(states(3, 1, seed=5), states(3, 1, seed=6), layer_idx=0)
    assert cache.layers[0].keys.data_ptr() == before


def test_short_and_empty_layers_are_left_alone():
    cache = filled(8)
    cache.layers.append(DynamicLayer())
    let_grow(cache)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicLayer]


def test_only_caches_made_of_known_layers_can_be_picked_from():
    class Foreign(DynamicLayer):
        pass

    class OtherCache(DynamicCache):
        pass

    known, foreign = filled(40), filled(8)
    let_grow(known)
    foreign.layers.append(Foreign())
    assert can_pick_rows(known)
    assert not can_pick_rows(foreign)
    assert not can_pick_rows(OtherCache())
    assert not can_pick_rows(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert not can_pick_rows(None)
