"""Which experts a rank keeps; that ranks then learn as one is in `tests/ranks_program.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig
from lachesis.train.distributed import expert_parallel
from lachesis.train.distributed.expert_parallel import ExpertCut
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.model.dispatch import ExpertGroup
from lachesis.train.model.experts import experts_of
from lachesis.train.model.lora import add_lora
from tests.tiny import tiny_model

NOBODY: Any = None


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch):
    """Cuts a model's experts as rank 1 of two does, without ranks: parts are plain parameters."""

    def own_experts(parameter: Any, *, rank: int, mesh: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(parameter.detach().chunk(2)[rank].clone())

    monkeypatch.setattr(expert_parallel, "own_experts", own_experts)
    return lambda model: ExpertCut(model, mesh=NOBODY, group=ExpertGroup(1, 2, NOBODY))


def test_a_rank_keeps_its_experts_and_knows_how_many_there_are(cut):
    model = tiny_model("qwen3_moe", mlp_only_layers=[0])
    experts = model.model.layers[1].mlp.experts
    before = {name: parameter.detach().clone() for name, parameter in experts.named_parameters()}
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "experts" not in name}
    found = cut(model)
    assert [found.apply(layer) for layer in decoder_layers(model)] == [None, experts]
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter, before[name][2:]), name
    assert all(torch.equal(model.get_parameter(name), value) for name, value in whole.items())
    assert experts_of(experts) == 4


def test_transformers_without_a_public_plan_will_do(cut, monkeypatch: pytest.MonkeyPatch):
    """As before 5.19."""
    owner = next(base for base in PreTrainedModel.__mro__ if "ep_plan" in vars(base))
    monkeypatch.delattr(owner, "ep_plan")
    model = tiny_model("qwen3_moe")
    assert cut(model).apply(decoder_layers(model)[0]) is model.model.layers[0].mlp.experts


def test_an_adapter_of_experts_is_refused(cut):
    model = tiny_model("qwen3_moe")
    add_lora(model, LoraAdapterConfig(r=4, targets=["gate_up_proj", "down_proj"]))
    with pytest.raises(ModelError, match=r"the adapter changes model\.layers\.0\.mlp\.experts") as caught:
        cut(model)
    assert "adapter.targets" in caught.value.remedy


def test_experts_that_nobody_has_tried_are_refused(cut):
    with pytest.raises(ModelError, match="has not been tested with Qwen2ForCausalLM") as caught:
        cut(tiny_model())
    assert "qwen3_moe" in caught.value.remedy
