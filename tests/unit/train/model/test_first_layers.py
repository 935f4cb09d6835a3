"""First layers of a model in float32: which they are, and that the model is afterwards what it was."""

from __future__ import annotations

import pytest
import torch

from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.first_layers import first_layers_in_float32, has_float32
from lachesis.train.model.forward import plan_forward
from tests.tiny import tiny_model

GEMMA = {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2, "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("architecture", "overrides", "enough"),
    [
        ("llama", {"num_hidden_layers": 6}, 2),
        ("gemma2", GEMMA, 4),
        ("deepseek_v3", {"num_hidden_layers": 6, "first_k_dense_replace": 3}, 4),
        ("gpt2", {"n_layer": 5}, 2),
        ("mamba", {"num_hidden_layers": 5}, 2),
    ],
)
def test_there_is_one_layer_of_each_kind(architecture, overrides, enough):
    model = tiny_model(architecture, **overrides).to(torch.bfloat16)
    with first_layers_in_float32(model, vocab_size=20):
        assert len(decoder_layers(model)) == enough
        assert model.dtype == torch.float32
        logits = model(input_ids=torch.arange(8)[None], use_cache=False).logits
        assert logits.dtype == torch.float32 and logits.shape[-1] == 20


def test_lists_inside_a_layer_are_no_list_of_layers():
    """A norm for each of four heads, in two layers."""
    model = tiny_model("stablelm", qk_layernorm=True, use_parallel_residual=True)
    assert decoder_layers(model) == list(model.model.layers)
    assert plan_forward(model, packing="auto").packed


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_afterwards_what_it_was(tied: bool):
    model = tiny_model("llama", num_hidden_layers=4, pad_token_id=40, tie_word_embeddings=tied).to(torch.bfloat16)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    padding = model.get_input_embeddings().padding_idx
    assert padding == 40
    with pytest.raises(ZeroDivisionError), first_layers_in_float32(model, vocab_size=20):
        assert model.get_input_embeddings().weight.shape[0] == 20
        raise ZeroDivisionError
    after = model.state_dict()
    assert list(after) == list(before)
    for name, (place, values) in before.items():
        assert after[name].data_ptr() == place
        assert torch.equal(after[name], values)
    assert model.get_input_embeddings().padding_idx == padding
    assert len(decoder_layers(model)) == 4
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_quantized_weights_have_no_float32():
    model = tiny_model("llama").to(torch.bfloat16)
    assert has_float32(model)
    layer = decoder_layers(model)[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    assert not has_float32(model)
