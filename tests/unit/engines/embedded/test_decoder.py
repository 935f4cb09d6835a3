"""A model's forward pass in pieces equals the same in one, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from lachesis.engines.embedded.decoder import (
    Decoder,
    GrowingLayer,
    ModelTraits,
    can_pick_rows,
    generation_mode,
    let_grow,
)
from tests.tiny import PAD_ID, tiny_model

CACHED = ["qwen2", "llama", "mistral", "gemma2", "gpt2", "bloom", "mamba", "lfm2", "bamba", "falcon_h1", "qwen3_5_text"]
RECOMPUTED = ["openai-gpt", "recurrent_gemma"]


@pytest.mark.parametrize(
    ("architecture", "cache_argument", "pads", "extends"),
    [
        ("qwen2", "past_key_values", True, True),
        ("bloom", "past_key_values", False, True),
        ("lfm2", "past_key_values", False, False),
        ("mamba", "cache_params", False, False),
        ("recurrent_gemma", None, False, False),
        ("openai-gpt", None, True, True),
    ],
)
def test_traits_of_architectures(architecture, cache_argument, pads, extends):
    traits = ModelTraits.of(tiny_model(architecture))
    assert (traits.cache_argument, traits.pads, traits.extends) == (cache_argument, pads, extends)


def full_logits(model: nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def make(model, prompts: list[list[int]]) -> Decoder:
    return Decoder(model, traits=ModelTraits.of(model), prompts=prompts, pad_token_id=PAD_ID)


@pytest.mark.parametrize("architecture", CACHED + RECOMPUTED)
def test_prefill_fork_and_steps_equal_whole_forward_passes(architecture):
    model = tiny_model(architecture)
    pads = ModelTraits.of(model).pads
    sequences = [[5, 6, 7, 8, 9, 10], [40, 41, 42], [70, 71, 72, 73]]
    sequences = sequences if pads else [ids[:3] for ids in sequences]
    with generation_mode(model):
        decoder = make(model, sequences)
        logits = decoder.prefill()
        for tokens in ([11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 21], [22, 23]):
            rows = [0, 2, 2, 1][: len(tokens)] if len(tokens) != len(sequences) else range(len(tokens))
            for i, ids in enumerate(sequences):
                torch.testing.assert_close(logits[i], full_logits(model, ids)[-1], rtol=1e-4, atol=1e-4)
            decoder.fork(torch.tensor(list(rows)))
            sequences = [[*sequences[row], token] for row, token in zip(rows, tokens, strict=True)]
            logits = decoder.step(torch.tensor(tokens))
        for i, ids in enumerate(sequences):
            torch.testing.assert_close(logits[i], full_logits(model, ids)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "mamba", "openai-gpt"])
def test_several_tokens_after_a_prompt_equal_a_whole_forward_pass(architecture):
    model, ids = tiny_model(architecture), list(range(10, 19))
    with generation_mode(model):
        decoder = make(model, [ids[:4]])
        logits = torch.cat([decoder.prefill(last_only=False), decoder.extend(torch.tensor([ids[4:]]))], dim=1)
    torch.testing.assert_close(logits[0], full_logits(model, ids), rtol=1e-4, atol=1e-4)


def test_a_long_sequence_outgrows_its_first_room():
    model, ids = tiny_model("qwen2"), [3 + i % 90 for i in range(100)]
    with generation_mode(model):
        decoder = make(model, [ids[:30]])
        decoder.prefill()
        for token in ids[30:]:
            logits = decoder.step(torch.tensor([token]))
    torch.testing.assert_close(logits[0], full_logits(model, ids)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "widths"), [(name, [4, 1, 1]) for name in CACHED] + [(name, [4, 5, 6]) for name in RECOMPUTED]
)
def test_what_a_step_feeds_to_the_model(architecture, widths):
    model, fed = tiny_model(architecture), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with generation_mode(model):
        decoder = make(model, [[5, 6, 7, 8]])
        decoder.prefill()
        decoder.step(torch.tensor([9]))
        decoder.step(torch.tensor([10]))
    assert fed == widths


def test_only_the_last_positions_logits_are_computed_at_prefill():
    model, rows = tiny_model("qwen2"), []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    with generation_mode(model):
        make(model, [[5, 6, 7, 8]]).prefill()
    assert rows == [1]


def test_generation_mode_restores_each_modules_own_mode_and_the_gradients():
    model = tiny_model("qwen2").train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    with pytest.raises(KeyError), generation_mode(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise KeyError
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.is_grad_enabled()


def test_layers_compiled_for_training_run_eagerly_while_generating():
    compiled_calls = []

    def backend(graph, inputs):
        compiled_calls.append(graph)
        return graph.forward

    model = tiny_model("qwen2", num_hidden_layers=1)
    model.model.layers[0].mlp.compile(backend=backend)
    with generation_mode(model):
        make(model, [[5, 6]]).prefill()
    assert not compiled_calls
    model(input_ids=torch.tensor([[5, 6]]))
    assert compiled_calls


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


def test_a_model_that_raises_with_a_cache_is_run_without_one(monkeypatch):
    model = tiny_model("qwen2")
    plain = model.forward

    def without_cache(*, use_cache: bool, **arguments):
        if use_cache:
            raise ValueError("`get_seq_length` can only be called on Attention layers")
        return plain(use_cache=use_cache, **arguments)

    expected = full_logits(model, [5, 6, 7, 8])
    traits = ModelTraits.of(model)
    monkeypatch.setattr(model, "forward", without_cache)
    with generation_mode(model):
        decoder = Decoder(model, traits=traits, prompts=[[5, 6, 7]], pad_token_id=PAD_ID)
        torch.testing.assert_close(decoder.prefill()[0], expected[2])
        torch.testing.assert_close(decoder.step(torch.tensor([8]))[0], expected[3])


def test_rows_of_tensors_that_a_model_binds_to_its_cache_cannot_be_picked():
    """Qwen4's sparse attention keeps the positions of all tokens there."""
    cache = filled(8)
    assert can_pick_rows(cache)
    cache.position_ids = torch.zeros(4, 3, 8)
    assert not can_pick_rows(cache)
