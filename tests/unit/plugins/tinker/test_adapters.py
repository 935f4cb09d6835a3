"""Adapters side by side on one model."""

from __future__ import annotations

import torch

from lachesis.plugins.tinker.adapters import AdapterBank
from lachesis.plugins.tinker.records import LoraShape
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 5, 8]])


def test_each_computes_alone_and_leaves_nothing_behind():
    model = tiny_model().to(torch.bfloat16)
    before = model(IDS).logits
    bank = AdapterBank(model, name="tiny")
    first, second = (bank.add(LoraShape(rank=2, seed=seed)) for seed in (1, 2))
    parameters = bank.parameters(first)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert set(parameters) == set(bank.parameters(second)) and any("lm_head" in name for name in parameters)
    bank.load(first, {name: torch.ones_like(p) for name, p in parameters.items()})
    for name, same in ((first, False), (second, True), (None, True)):
        with bank.active(name):
            assert torch.equal(model(IDS).logits, before) is same
    bank.remove(first)
    with bank.active(second):
        assert torch.equal(model(IDS).logits, before)


def test_an_adapter_hangs_where_it_is_told():
    bank = AdapterBank(tiny_model("gpt2"), name="tiny")
    name = bank.add(LoraShape(rank=2, seed=0, train_mlp=False, train_unembed=False))
    assert {key.split(".")[-4] for key in bank.parameters(name)} == {"attn"}
