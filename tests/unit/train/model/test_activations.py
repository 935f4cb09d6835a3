"""What layers keep for the backward pass: the same gradients, and attention computed once or twice."""

from __future__ import annotations

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from lachesis.train.model.activations import keep_activations

LAYERS = 2


class Attentions(TorchDispatchMode):
    """Counts the attention kernels that run forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.count += "_attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def made() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_hidden_layers=LAYERS, **sizes)).train()


def learn(model: Qwen2ForCausalLM) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients by name, and how often attention ran."""
    with Attentions() as attentions:
        model(input_ids=torch.arange(12)[None], use_cache=False).logits.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, attentions.count


@pytest.mark.parametrize(("which", "attentions"), [("keep", 1), ("selective", 1), ("recompute", 2), ("offload", 2)])
def test_gradients_are_the_same_and_attention_runs_again_only_to_recompute_all(which, attentions):
    expected, _ = learn(made())
    model = made()
    keep_activations(model, which)
    found, count = learn(model)
    assert count == attentions * LAYERS
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])


def test_offloaded_layers_learn_what_recomputed_ones_do_bit_by_bit():
    model, other = made(), made()
    keep_activations(model, "offload")
    keep_activations(other, "recompute")
    for _ in range(2):  # a second pass has nothing of the first
        (found, _), (expected, _) = learn(model), learn(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_of_offloaded_layers_the_inputs_themselves_are_gone_until_the_backward_pass():
    def still_there(which: str) -> int:
        model, inputs = made(), []
        keep_activations(model, which)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))
        output = model(input_ids=torch.arange(12)[None], use_cache=False).logits
        there = sum(one() is not None for one in inputs)
        output.sum().backward()
        assert len(inputs) == 2 * LAYERS
        return there

    assert still_there("recompute") == LAYERS
    assert still_there("offload") == 0


def test_selective_layers_keep_less():
    def kept(which: str) -> int:
        model, sizes = made(), Counter()
        keep_activations(model, which)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.update({t.data_ptr(): 1}) or t, lambda t: t):
            model.base_model(input_ids=torch.arange(12)[None], use_cache=False)
        return len(sizes)

    assert kept("selective") < kept("keep") / 2


@pytest.mark.parametrize("which", ["selective", "offload"])
def test_a_copy_of_a_model_runs_its_own_layers(which):
    model = made()
    keep_activations(model, which)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert not torch.equal(model(torch.arange(4)[None]).logits, other(torch.arange(4)[None]).logits)
    expected = made()
    expected.load_state_dict(other.state_dict())
    torch.testing.assert_close(other(torch.arange(4)[None]).logits, expected(torch.arange(4)[None]).logits)
